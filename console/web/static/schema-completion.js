// What may stand at a place of a policy document, of the policy's JSON Schema and of the names that the document declares.
//
// 1. No word is written here: keys, choices and examples are the schema's, and `x-names` says where names are declared.
// 2. The place is read from the syntax tree of the document with a word of ours at the cursor, as a key and as a value.

const HERE = "cursor-is-here";
const WORD = /[^\s,[\]{}]*/;
const PLAIN = /^[A-Za-z0-9/][A-Za-z0-9 ._@:/%^-]*$/;
const CONTAINERS = ["object", "array"];

// `complete(text, position)` gives `{ from, to, options }`, or null where nothing is known.
export function completion(schema, parser) {
  return function complete(text, position) {
    const from = position - /[^\s,[\]{}]*$/.exec(text.slice(0, position))[0].length;
    const to = position + WORD.exec(text.slice(position))[0].replace(/:$/, "").length;
    const line = text.slice(text.lastIndexOf("\n", from - 1) + 1, from);
    if (/(^|\s)#/.test(line)) return null;
    const named = /^:(\s|$)/.test(text.slice(to)); // the key of a pair that is there
    const value = /:\s+$|\[[^\]{}]*$/.test(line) || /^\s*(-\s+)+$/.test(line);
    const options = new Map();
    const add = (option) => { if (!options.has(option.label)) options.set(option.label, option); };
    if (named || !/:\s+$/.test(line)) {
      const place = placeAt(parser, text, from, to, named ? HERE : `${HERE}: 0`);
      if (place?.key) keysAt(schema, place, named, /[{,]\s*$/.test(line)).forEach(add);
    }
    if (value && !named) {
      const place = placeAt(parser, text, from, to, HERE);
      if (place !== null && !place.key) valuesAt(schema, place).forEach(add);
    }
    return options.size ? { from, to, options: [...options.values()] } : null;
  };
}

function placeAt(parser, text, from, to, word) {
  const edited = text.slice(0, from) + word + text.slice(to);
  const tree = parser.parse(edited);
  const path = [];
  let key = false;
  for (let node = tree.resolveInner(from, 1); node.parent !== null; node = node.parent) {
    const { parent } = node;
    if (parent.name === "Pair" && node.name === "Key") key ||= path.length === 0;
    else if (parent.name === "Pair") path.unshift(said(parent.getChild("Key"), edited));
    else if (node.name === "Item") path.unshift(parent.getChildren("Item").findIndex((one) => one.from === node.from));
  }
  const root = tree.topNode.getChild("Document")?.firstChild;
  return root ? { path, key, document: read(root, edited) } : null;
}

const said = (node, text) => {
  const written = text.slice(node.from, node.to).trim();
  return /^(["']).*\1$/.test(written) ? written.slice(1, -1) : written;
};

// A document as maps, lists and words.
function read(node, text) {
  if (/Mapping$/.test(node.name)) {
    const pairs = node.getChildren("Pair").filter((pair) => pair.getChild("Key") !== null);
    return new Map(pairs.map((pair) => [said(pair.getChild("Key"), text), read(pair.lastChild, text)]));
  }
  if (/Sequence$/.test(node.name)) return node.getChildren("Item").map((item) => read(item.firstChild ?? item, text));
  return said(node, text);
}

const inside = (held, step) => (held instanceof Map ? held.get(step) : Array.isArray(held) ? held[step] : undefined);

// The forms that a part of the schema allows.
function forms(schema, part) {
  if (part.$ref !== undefined) return forms(schema, part.$ref.split("/").slice(1).reduce((found, name) => found[name], schema));
  return part.anyOf === undefined ? [part] : part.anyOf.flatMap((one) => forms(schema, one));
}

function fieldOf(form, name, held) {
  const narrowed = form.if !== undefined && held instanceof Map
    && Object.entries(form.if.properties).every(([field, one]) => held.get(field) === one.const);
  const more = form.additionalProperties;
  return (narrowed ? form.then.properties[name] : undefined) ?? form.properties?.[name] ?? (typeof more === "object" ? more : undefined);
}

function formsAt(schema, { path, document }) {
  let found = forms(schema, schema), held = document;
  for (const step of path) {
    const parts = found.map((form) => (typeof step === "number" ? form.items : fieldOf(form, step, held)));
    found = parts.filter((part) => part !== undefined).flatMap((part) => forms(schema, part));
    held = inside(held, step);
  }
  return { found, held };
}

function namesOf(form, { path, document }) {
  const names = form["x-names"];
  if (names === undefined) return [];
  const above = path.filter((step) => typeof step === "string").at(-1);
  const held = names.in.split("/").map((step) => (step === "*" ? above : step)).reduce(inside, document);
  const words = held instanceof Map ? [...held.keys()] : Array.isArray(held) ? held : [held];
  return words.filter((word) => typeof word === "string" && word !== HERE && word !== names.but);
}

const ranked = (options) => options.map((option, rank) => ({ ...option, boost: Math.max(99 - rank, -99) }));

function keysAt(schema, place, named, flow) {
  const { found, held } = formsAt(schema, place);
  const options = [];
  for (const form of found) {
    const needed = new Set(form.required);
    for (const name of Object.keys(form.properties ?? {}).sort((one, other) => needed.has(other) - needed.has(one))) {
      const parts = forms(schema, form.properties[name]);
      const opens = !flow && parts.every((part) => CONTAINERS.includes(part.type));
      options.push({
        label: name, type: "property", detail: needed.has(name) ? "required" : undefined,
        info: form.properties[name].description ?? parts[0].description,
        apply: named ? name : `${name}:${opens ? "" : " "}`,
      });
    }
    for (const names of forms(schema, form.propertyNames ?? {})) {
      for (const name of [...namesOf(names, place), ...(names.const === undefined ? [] : [names.const])]) {
        options.push({ label: name, type: "variable", detail: names["x-names"]?.in, apply: named ? name : `${name}: ` });
      }
    }
  }
  return ranked(options.filter(({ label }) => !(held instanceof Map && held.has(label))));
}

function valuesAt(schema, place) {
  const above = formsAt(schema, { ...place, path: place.path.slice(0, -1) }).held;
  const listed = Array.isArray(above) ? above : [];
  const options = [];
  for (const form of formsAt(schema, place).found) {
    const add = (words, type, detail) => {
      for (const word of words) {
        const label = typeof word === "string" && !PLAIN.test(word) ? JSON.stringify(word) : String(word);
        options.push({ label, type, detail, info: form.description, apply: label });
      }
    };
    add(form.enum ?? [], "enum");
    if (form.const !== undefined) add([form.const], "enum");
    if (form.type === "boolean") add([true, false], "enum");
    add(namesOf(form, place), "variable", form["x-names"]?.in);
    add(form.examples ?? [], "text", "for example");
  }
  return ranked(options.filter(({ label }) => !listed.includes(label)));
}
