// Bundles the editor for the console: one file, with the name, version and licence of everything in it at its top.
import { build } from "esbuild";
import { readFileSync, writeFileSync } from "node:fs";

const TARGET = process.argv[2];
const made = await build({
  entryPoints: ["entry.js"], bundle: true, minify: true, format: "esm", target: "es2022", charset: "utf8",
  write: false, metafile: true, legalComments: "none",
});

const packages = new Set();
for (const input of Object.keys(made.metafile.inputs)) {
  const found = /^node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(input);
  if (found !== null) packages.add(found[1]);
}
const licences = new Map();
for (const name of [...packages].sort()) {
  const { version } = JSON.parse(readFileSync(`node_modules/${name}/package.json`, "utf8"));
  const text = readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim();
  licences.set(text, [...(licences.get(text) ?? []), `${name} ${version}`]);
}
const said = [...licences].map(([text, names]) => `${names.join("\n")}\n\n${text}`).join("\n\n---\n\n");
writeFileSync(TARGET, `/*! Made by \`make editor\` of packaging/editor; not written by hand.\n\n${said}\n*/\n${made.outputFiles[0].text}`);
