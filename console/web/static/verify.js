// Checks in the browser that a leaf is in the ledger: RFC 6962 paths, the opening of the sub-log's head, and the
// signature of the checkpoint. Nothing that the server concludes is believed; what it sends is only material.
//
// 1. A path is accepted only in exactly the shape that the tree calls for.
// 2. The key is the one that this browser saw first for this ledger, unless the reader lets it go.

const encoder = new TextEncoder();
const DOMAIN = encoder.encode("kvcustody/sub-log-head@1\0");
const PATH_MAX = 64;
const PINNED = "kvcustody-ledger-key:";

class Wrong extends Error {}

const must = (holds, why) => { if (!holds) throw new Wrong(why); };
const join = (...parts) => {
  const made = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let place = 0;
  for (const part of parts) { made.set(part, place); place += part.length; }
  return made;
};
const same = (one, other) => one.length === other.length && one.every((byte, place) => byte === other[place]);
const sha256 = async (...parts) => new Uint8Array(await crypto.subtle.digest("SHA-256", join(...parts)));
const leafHash = (leaf) => sha256(Uint8Array.of(0), leaf);
const nodeHash = (left, right) => sha256(Uint8Array.of(1), left, right);

export function fromBase64(text) {
  let bytes;
  try { bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0)); } catch { throw new Wrong("base64 is malformed"); }
  must(btoa(String.fromCharCode(...bytes)) === text, "base64 is malformed");
  return bytes;
}

// The root that a path leads to (RFC 9162, 2.1.3.2); sizes are BigInt.
export async function rootOf(hash, index, size, path) {
  must(index >= 0n && index < size, "the leaf is outside the tree");
  must(path.length <= PATH_MAX, "the path is longer than any tree's");
  let node = index, last = size - 1n, root = hash;
  for (const sibling of path) {
    must(last !== 0n, "the path is too long");
    if (node & 1n || node === last) {
      root = await nodeHash(sibling, root);
      while (node !== 0n && !(node & 1n)) { node >>= 1n; last >>= 1n; }
    } else root = await nodeHash(root, sibling);
    node >>= 1n; last >>= 1n;
  }
  must(last === 0n, "the path is too short");
  return root;
}

function number(text) {
  must(/^(0|[1-9][0-9]{0,18})$/.test(text), "a number is malformed");
  return BigInt(text);
}

// kvcustody/leaf-proof@1: the leaf's path, an empty line, and a tlog-proof of the head whose extra data is the opening.
function parse(text) {
  const lines = text.split("\n");
  const take = (pattern) => {
    const found = pattern.exec(lines.shift() ?? "");
    must(found !== null, "the proof is malformed");
    return found[1];
  };
  const path = () => {
    const found = [];
    while (lines.length && lines[0] !== "") {
      const hash = fromBase64(lines.shift());
      must(hash.length === 32, "a hash is not 32 bytes long");
      found.push(hash);
    }
    must(lines.shift() === "", "the proof is malformed");
    return found;
  };
  take(/^(kvcustody\/leaf-proof@1)$/);
  const index = number(take(/^index (\S+)$/)), leafPath = path();
  take(/^(c2sp\.org\/tlog-proof@v1)$/);
  const extra = fromBase64(take(/^extra (\S+)$/));
  const headIndex = number(take(/^index (\S+)$/)), headPath = path();
  must(extra.length > 72, "the opening is malformed");
  const opening = {
    salt: extra.slice(0, 32), size: new DataView(extra.buffer, 32, 8).getBigUint64(0), root: extra.slice(40, 72),
    name: new TextDecoder("utf-8", { fatal: true }).decode(extra.slice(72)), committed: extra.slice(32),
  };
  return { index, leafPath, headIndex, headPath, opening, note: lines.join("\n") };
}

function parseNote(note) {
  const cut = note.lastIndexOf("\n\n");
  must(cut > 0 && note.endsWith("\n"), "the checkpoint is no signed note");
  const text = note.slice(0, cut + 1), lines = text.split("\n");
  must(lines.length >= 4, "the checkpoint is malformed");
  const signatures = note.slice(cut + 2, -1).split("\n").map((line) => {
    const found = /^\u2014 (\S+) (\S+)$/.exec(line);
    must(found !== null, "a signature line is malformed");
    const data = fromBase64(found[2]);
    return { name: found[1], id: data.slice(0, 4), bytes: data.slice(4) };
  });
  return { text, origin: lines[0], size: number(lines[1]), root: fromBase64(lines[2]), signatures };
}

async function keyOf(vkey) {
  const [name, id, ...rest] = vkey.split("+"), data = fromBase64(rest.join("+"));
  const found = await sha256(encoder.encode(name + "\n"), data);
  const hex = [...found.slice(0, 4)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  must(hex === id, "the ledger's key does not have its id");
  return { name, id: found.slice(0, 4), kind: data[0], bytes: data.slice(1) };
}

async function signedBy(note, vkeys) {
  for (const vkey of vkeys) {
    const key = await keyOf(vkey);
    const line = note.signatures.find((one) => one.name === key.name && same(one.id, key.id));
    if (line === undefined || key.kind !== 1 || note.origin !== key.name) continue;
    const imported = await crypto.subtle.importKey("raw", key.bytes, { name: "Ed25519" }, false, ["verify"]);
    must(await crypto.subtle.verify({ name: "Ed25519" }, imported, line.bytes, encoder.encode(note.text)),
      "the signature under the checkpoint does not fit");
    return vkey;
  }
  throw new Wrong("the checkpoint is not signed by the ledger's key");
}

// Every step in turn; `say` hears of each that holds.
export async function verify({ leaf, log, idx, proof, keys }, say) {
  const found = parse(proof);
  must(found.index === BigInt(idx) && found.opening.name === log, "the proof is of another leaf");
  const head = await rootOf(await leafHash(encoder.encode(leaf)), found.index, found.opening.size, found.leafPath);
  must(same(head, found.opening.root), "the bytes do not lead to the head of this log");
  say(`The bytes are leaf ${idx} of ${found.opening.size} in ${log} (${found.leafPath.length} hashes).`);
  const secret = await crypto.subtle.importKey("raw", found.opening.salt, { name: "HMAC", hash: "SHA-256" }, false, ["sign"]);
  const commitment = new Uint8Array(await crypto.subtle.sign("HMAC", secret, join(DOMAIN, found.opening.committed)));
  const note = parseNote(found.note);
  const root = await rootOf(await leafHash(commitment), found.headIndex, note.size, found.headPath);
  must(same(root, note.root), "the head of this log is not under the checkpoint");
  say(`That head is leaf ${found.headIndex} of the ${note.size} in the root log (${found.headPath.length} hashes).`);
  const key = await signedBy(note, keys);
  say(`The checkpoint of ${note.size} is signed by ${key.split("+").slice(0, 2).join(", key ")}.`);
  return { origin: note.origin, key };
}

// The first key that this browser saw for a ledger stays the one it believes; a later one must be let in by hand.
function pinned(keys) {
  const origin = keys[0].split("+")[0];
  const known = localStorage.getItem(PINNED + origin);
  return { origin, known, keys: known === null || !keys.includes(known) ? keys : keys.slice(keys.indexOf(known)) };
}

function show(place, mark, title, steps, more = "") {
  const box = document.createElement("div"), heading = document.createElement("p"), list = document.createElement("ol");
  box.className = `notice ${mark}`;
  list.className = "steps";
  const strong = document.createElement("strong");
  strong.textContent = title;
  heading.append(strong);
  for (const [good, text] of steps) {
    const item = document.createElement("li");
    item.className = good ? "yes" : "no";
    item.textContent = text;
    list.append(item);
  }
  const note = document.createElement("p");
  note.textContent = more;
  box.append(heading, list, note);
  place.replaceChildren(box);
}

async function run(element, place) {
  const { log, idx } = element.dataset, keys = element.dataset.keys.split(" ").filter(Boolean), steps = [];
  try {
    must(crypto.subtle !== undefined, "this browser offers no cryptography on this address; use TLS or localhost");
    must(keys.length > 0, "the ledger has no signing key on record");
    const trusted = pinned(keys);
    must(trusted.known === null || keys.includes(trusted.known), "the ledger's key is not the one that this browser knows");
    const answer = await fetch(`/v1/audit/proofs/inclusion?log=${encodeURIComponent(log)}&idx=${idx}`);
    must(answer.status !== 404, "no signed checkpoint covers this leaf yet; try again in a few seconds");
    must(answer.ok, `the service answered with ${answer.status}`);
    const given = await answer.json(), shown = document.getElementById("leaf").textContent;
    must(given.canonical === shown, "the proof is of other bytes than those on this page");
    steps.push([true, "The proof is of the bytes on this page."]);
    const found = await verify({ leaf: shown, log, idx, proof: given.proof, keys: trusted.keys }, (text) => steps.push([true, text]));
    if (trusted.known === null) localStorage.setItem(PINNED + trusted.origin, found.key);
    const first = "This browser saw the key for the first time and keeps it. Compare its id with what your auditors have.";
    show(place, "good", "Verified", steps, trusted.known === null ? first : "The key is the one that this browser knows.");
  } catch (error) {
    steps.push([false, error instanceof Wrong ? error.message : `the check could not be made: ${error.message}`]);
    show(place, "bad", "Not verified", steps, "Do not rely on this leaf before it is clear why.");
  }
}

const element = document.getElementById("verify");
if (element !== null) {
  const button = document.getElementById("verify-button");
  button.addEventListener("click", async () => {
    button.disabled = true;
    await run(element, document.getElementById("verify-result"));
    button.disabled = false;
  });
}

// The explorer's key for a proof leads here: it is checked at once. On this page `p` checks, `r` leads to the bytes.
if (location.hash === "#verify") document.getElementById("verify-button")?.click();
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  if (event.key === "p") document.getElementById("verify-button")?.click();
  if (event.key === "r") document.getElementById("leaf")?.scrollIntoView();
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  if (event.key === "r") document.getElementById("leaf").focus();
  else if (event.key === "p") document.getElementById("verify-button").click();
});
