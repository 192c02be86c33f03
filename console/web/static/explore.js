// The audit explorer: keys that move among events, and views kept in this browser.
const rows = () => [...document.querySelectorAll("#found tbody tr")];
let at = -1;

function select(place) {
  const every = rows();
  if (every.length === 0) return;
  at = Math.min(Math.max(0, place), every.length - 1);
  every[at].querySelector("summary, a").focus();
}

function open(part) {
  const focused = rows().findIndex((row) => row.contains(document.activeElement));
  const row = rows()[focused >= 0 ? focused : at];
  if (row === undefined) return;
  const folded = row.querySelector("details");
  if (folded !== null && document.activeElement.closest("li") === null) folded.open = !folded.open;
  else location.href = (document.activeElement.closest("li") ?? row).querySelector("a").href + part;
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  if (event.key === "j") select(at + 1);
  else if (event.key === "k") select(at - 1);
  else if (event.key === "o") open("");
  else if (event.key === "r") open("#leaf");
  else if (event.key === "p") open("#verify");
});

const KEPT = "kvcustody.audit.views";
const saved = document.getElementById("saved");
let views = [];
try { views = JSON.parse(localStorage.getItem(KEPT)) ?? []; } catch { views = []; }

function show() {
  const list = saved.querySelector("ul");
  list.replaceChildren(...views.map((view, place) => {
    const item = document.createElement("li");
    const link = document.createElement("a");
    link.href = "/console/audit" + (view.query.startsWith("?") ? view.query : "");
    link.textContent = view.name;
    const remove = document.createElement("button");
    remove.className = "plain";
    remove.textContent = "Remove";
    remove.setAttribute("aria-label", "Remove " + view.name);
    remove.addEventListener("click", () => { views.splice(place, 1); keep(); });
    item.append(link, " ", remove);
    return item;
  }));
}

function keep() {
  localStorage.setItem(KEPT, JSON.stringify(views));
  show();
}

saved.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const field = event.target.elements.name;
  const query = new URLSearchParams(location.search);
  query.delete("cursor");
  views.push({ name: field.value, query: "?" + query });
  field.value = "";
  keep();
});
show();
