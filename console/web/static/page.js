// What pages do by themselves: work that goes on is shown as it goes on. Without scripts, reload the page.
const PAUSE_MS = 1500;

// An element with `data-live` is replaced by what the server says now, until the server leaves the mark out.
async function follow(element) {
  while (element !== null && element.dataset.live !== undefined) {
    await new Promise((resolve) => setTimeout(resolve, Number(element.dataset.live) || PAUSE_MS));
    let answer;
    try { answer = await fetch(location.href, { headers: { Accept: "text/html" } }); } catch { continue; }
    if (!answer.ok || answer.redirected) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById(element.id);
    if (fresh === null) return;
    const next = document.importNode(fresh, true);
    const opened = [...element.querySelectorAll("details")].map((part) => part.open);
    next.querySelectorAll("details").forEach((part, place) => { part.open = opened[place] ?? part.open; });
    element.replaceWith(next);
    element = next;
    document.dispatchEvent(new Event("refreshed"));
  }
}

for (const element of document.querySelectorAll("[data-live]")) follow(element);

// On a telephone the menu is one line: the open page's place is in view.
// `scrollIntoView` would move the start of the keyboard's order there, behind the link that skips the menu.
const opened = document.querySelector("nav a[aria-current]");
if (opened !== null) {
  const menu = opened.closest("nav"), place = opened.getBoundingClientRect();
  menu.scrollLeft += place.left + place.width / 2 - (menu.getBoundingClientRect().left + menu.clientWidth / 2);
}

// A button inside `data-sure` works only once the field beside it says what is about to be done.
for (const form of document.querySelectorAll("form[data-sure]")) {
  const field = form.querySelector("input[name=sure]");
  const button = form.querySelector("button");
  const check = () => { button.disabled = field.value.trim() !== form.dataset.sure; };
  field.addEventListener("input", check);
  check();
}
