// Signs a step of the policy's release with a person's own key. The key is read from its file, imported as a key that
// cannot be taken out again, used, and forgotten; the service gets the signed step and nothing else.
//
// 1. The step is made canonical here and signed here; what it names is compared with what the page shows.
// 2. The bytes that are signed begin with the schema's name, so that no other statement has the same bytes.

const encoder = new TextEncoder();
const PKCS8_ED25519 = Uint8Array.of(0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20);

const AFTER = { consented: "/console/policy/consents", revoked: "/console/grants" };

// `wrong` says what is wrong by field of the form; what belongs to no field stands under "".
class Refused extends Error {
  constructor(why, wrong = { "": why }) { super(why); this.wrong = wrong; }
}
const must = (holds, why, field = "") => { if (!holds) throw new Refused(why, { [field]: why }); };

// RFC 8785 without floats: keys in order, no white space.
export function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value !== null && typeof value === "object") {
    return `{${Object.keys(value).sort().map((key) => `${JSON.stringify(key)}:${canonical(value[key])}`).join(",")}}`;
  }
  must(typeof value !== "number" || Number.isSafeInteger(value), "the step holds a number that is not whole");
  return JSON.stringify(value);
}

const toBase64 = (bytes) => btoa(String.fromCharCode(...new Uint8Array(bytes)));

// The text of a key file: PRIVATE+KEY+name+id+base64(type ‖ seed); type 1 is Ed25519.
async function openKey(file) {
  must(file !== undefined && file.size > 0 && file.size <= 1024, "choose your key file", "key");
  const found = /^PRIVATE\+KEY\+([^+\s]+)\+[0-9a-f]{8}\+([A-Za-z0-9+/]+=*)\n?$/.exec(await file.text());
  must(found !== null, "this is not a private key of kvcustody; its public half ends in .pub", "key");
  const secret = Uint8Array.from(atob(found[2]), (char) => char.charCodeAt(0));
  must(secret.length === 33 && secret[0] === 1, "this key is not an Ed25519 key", "key");
  const wrapped = new Uint8Array(PKCS8_ED25519.length + 32);
  wrapped.set(PKCS8_ED25519);
  wrapped.set(secret.subarray(1), PKCS8_ED25519.length);
  const key = await crypto.subtle.importKey("pkcs8", wrapped, { name: "Ed25519" }, false, ["sign"]);
  secret.fill(0);
  wrapped.fill(0);
  return { name: found[1], key };
}

async function signature({ name, key }, schema, form) {
  const made = await crypto.subtle.sign({ name: "Ed25519" }, key, encoder.encode(`${schema}\n${canonical(form)}`));
  return { key: name, signature: toBase64(made) };
}

async function digest(text) {
  const made = new Uint8Array(await crypto.subtle.digest("SHA-256", encoder.encode(text)));
  return "sha256:" + [...made].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

// Whether the prepared step is the one that the form asked for, about the document on this page.
async function check(step, fields, made) {
  must(made.head.action === step, "the service prepared another step");
  if (fields.get("revision")) must(made.body.revision === Number(fields.get("revision")), "the service prepared another revision");
  const shown = fields.get("source") ?? document.getElementById("document")?.value;
  if (made.manifest !== null && shown !== undefined) {
    must(made.manifest.document === await digest(shown), "the manifest is not of the document on this page");
    must(made.manifest.revision === made.body.revision, "the manifest is of another revision");
  }
  if (step === "approved") must(made.body.cells === fields.get("cells"), "what it widens is not what this page shows");
  if (step === "revoked") must(canonical(made.body.ids) === canonical([fields.get("id")]), "the service prepared another revocation");
  if (step === "consented") must(made.body.opening === fields.get("opening"), "the service prepared another consent");
}

async function ask(url, options, csrf) {
  const answer = await fetch(url, { ...options, headers: { ...options.headers, "X-CSRF-Token": csrf } });
  const type = answer.headers.get("content-type") ?? "";
  if (answer.ok) return answer.json();
  if (type.includes("json")) {
    const problem = await answer.json();
    throw new Refused(problem.detail ?? problem.title, problem.wrong);
  }
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  throw new Refused(page.querySelector("main .notice.bad")?.textContent ?? `the service answered with ${answer.status}`);
}

// A text whose parts in backticks are code.
const words = (text) => text.split("`").map((part, place) => {
  if (place % 2 === 0) return part;
  return Object.assign(document.createElement("code"), { textContent: part });
});

// Each fault at its field, with the remedy; what was typed stays. Faults of no field that is shown are returned.
function mark(form, wrong) {
  for (const old of form.querySelectorAll(".wrong-field")) old.remove();
  for (const field of form.querySelectorAll("[aria-invalid]")) {
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-describedby");
  }
  const rest = [];
  let first = null;
  for (const [name, text] of Object.entries(wrong)) {
    const field = name === "" ? null : form.querySelector(`label [name="${CSS.escape(name)}"]`);
    if (field === null) { rest.push(text); continue; }
    const fault = document.createElement("span");
    fault.className = "wrong-field";
    fault.id = `${form.dataset.sign}-${name}-wrong`;
    fault.setAttribute("role", "alert");
    fault.replaceChildren(...words(text));
    field.after(fault);
    field.setAttribute("aria-invalid", "true");
    field.setAttribute("aria-describedby", fault.id);
    first ??= field;
  }
  first?.focus();
  return rest.join("; ");
}

// What a browser would say in bubbles, one at a time, stands at the fields instead, all at once.
function checkFilled(form) {
  const wrong = {};
  for (const field of form.querySelectorAll("[required]")) {
    if (!field.value.trim()) wrong[field.name] = field.type === "file" ? "choose your key file" : "fill this in";
  }
  for (const field of form.querySelectorAll("input[type=number]")) {
    if (!field.checkValidity()) wrong[field.name] = `use a whole number from ${field.min} to ${field.max}`;
  }
  if (Object.keys(wrong).length) throw new Refused("not accepted yet", wrong);
}

async function take(form, say) {
  must(crypto.subtle !== undefined, "this browser signs nothing on this address; use TLS or localhost");
  const step = form.dataset.sign, fields = new FormData(form), csrf = document.querySelector("meta[name=csrf]").content;
  const key = await openKey(fields.get("key"));
  fields.delete("key");
  if (fields.has("source")) fields.set("source", form.elements.source.value);
  say("Preparing…");
  const asked = new URLSearchParams({ step });
  for (const [name, value] of fields) asked.set(name, value);
  const made = await ask("/console/policy/step", { method: "POST", body: asked }, csrf);
  await check(step, fields, made);
  const body = { ...made.body };
  if (made.manifest !== null) body.signature = await signature(key, made.bundle_schema, made.manifest);
  const unsigned = { ...made.head, body };
  const record = canonical({ ...unsigned, signature: await signature(key, made.schema, unsigned) });
  say("Sending…");
  const headers = { "Content-Type": "application/json", "Idempotency-Key": crypto.randomUUID(), "If-Match": made.if_match };
  await ask(made.url, { method: "POST", headers, body: JSON.stringify({ record }) }, csrf);
  return made.revision;
}

for (const form of document.querySelectorAll("form[data-sign]")) {
  form.noValidate = true;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const button = form.querySelector("button"), result = form.querySelector(".sign-result");
    const say = (text, mark = "") => { result.replaceChildren(...words(text)); result.className = `sign-result ${mark && `notice ${mark}`}`; };
    button.disabled = true;
    mark(form, {});
    try {
      checkFilled(form);
      const revision = await take(form, say);
      say("Done.", "good");
      location.assign(AFTER[form.dataset.sign] ?? `/console/policy/${revision}`);
    } catch (error) {
      const rest = error instanceof Refused ? mark(form, error.wrong) : `it could not be signed: ${error.message}`;
      say(rest, rest && "bad");
      button.disabled = false;
    }
  });
}
