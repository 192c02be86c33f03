// The draft's text in an editor: completion of the policy's schema, and the validator's problems under their lines while
// one writes. The field that it stands for stays in the form and has the same text; without scripts it is the editor.
//
// 1. The editor lives in a shadow root, where its styles are adopted: the page's policy of content allows no other.
// 2. Tab leaves the editor; only an open list of completions takes it.
const PAUSE_MS = 400;
const SHOWN = 12; // completions at once: the list moves with the choice, and need not be scrolled

async function open(field) {
  const { editor, completion, schema } = field.dataset;
  const [mirror, completing, answer] = await Promise.all([import(editor), import(completion), fetch(schema)]);
  const complete = completing.completion(await answer.json(), mirror.yamlLanguage.parser);
  const label = field.labels[0];
  const host = document.createElement("div");
  host.className = "editor";
  const status = Object.assign(document.createElement("p"), { className: "quiet", id: "editor-status" });
  status.setAttribute("role", "status");
  const help = Object.assign(document.createElement("p"), {
    className: "quiet",
    textContent: "Ctrl-Space completes, F8 goes to the next problem, Ctrl-Enter checks, Tab leaves.",
  });
  field.after(host, status, help);
  const root = host.attachShadow({ mode: "open" });
  const view = new mirror.EditorView({
    doc: field.value, root, parent: root,
    extensions: [
      behaviour(mirror, field, complete, (text) => { status.textContent = text; }),
      mirror.EditorView.contentAttributes.of({ "aria-label": label.textContent, tabindex: "0" }),
      appearance(mirror),
    ],
  });
  label.htmlFor = "";
  label.addEventListener("click", () => view.focus());
  field.required = false; // the service says so of an empty document
  if (document.activeElement === field) view.focus();
  field.hidden = true;
}

function behaviour(mirror, field, complete, say) {
  const source = (context) => {
    const typed = context.matchBefore(/[^\s,[\]{}]+|[:[{-] /);
    const found = context.explicit || typed !== null ? complete(context.state.doc.toString(), context.pos) : null;
    const word = context.state.sliceDoc(found?.from, context.pos);
    return context.explicit || !found?.options.some(({ label }) => label === word) ? found : null;
  };
  return [
    mirror.lineNumbers(), mirror.history(), mirror.highlightActiveLine(), mirror.closeBrackets(),
    mirror.yaml(), mirror.indentUnit.of("  "), mirror.EditorView.lineWrapping,
    mirror.autocompletion({
      override: [source], activateOnCompletion: ({ type }) => type === "property", icons: false, maxRenderedOptions: SHOWN,
    }),
    mirror.linter((view) => problemsOf(view.state.doc, say), { delay: PAUSE_MS, tooltipFilter: () => [] }),
    problemsUnderLines(mirror),
    mirror.EditorView.updateListener.of((update) => {
      if (update.docChanged) field.value = update.state.doc.toString();
    }),
    mirror.keymap.of([
      { key: "Tab", run: mirror.acceptCompletion },
      { key: "Mod-Enter", run: () => { field.form.requestSubmit(); return true; } },
      ...mirror.closeBracketsKeymap, ...mirror.completionKeymap, ...mirror.lintKeymap, ...mirror.searchKeymap,
      ...mirror.historyKeymap, ...mirror.defaultKeymap,
    ]),
  ];
}

// What the service's validator says of a text, each where it stands.
async function problemsOf(doc, say) {
  let answer, found;
  try {
    answer = await fetch("/v1/policies:validate", {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-CSRF-Token": document.querySelector("meta[name=csrf]").content },
      body: JSON.stringify({ source: doc.toString() }),
    });
    found = await answer.json();
  } catch {
    say("Not checked: the service does not answer.");
    return [];
  }
  if (!answer.ok) {
    say(`Not checked: ${found.detail ?? found.title}.`);
    return [];
  }
  const [first] = found.problems, count = found.problems.length + found.omitted;
  say(found.sound ? "No problem." : `${count} problem${count > 1 ? "s" : ""}. Line ${first.line}: ${messageOf(first)}`);
  return found.problems.map((problem) => {
    const line = doc.line(Math.min(Math.max(problem.line, 1), doc.lines));
    const before = [...line.text].slice(0, problem.column - 1).join("").length; // columns count characters
    const word = /^("[^"]*"|'[^']*'|[^\s,[\]{}]+|.)?/u.exec(line.text.slice(before))[0];
    const from = line.from + before;
    return { from, to: from + word.length, severity: "error", message: messageOf(problem) };
  });
}

const messageOf = ({ code, message, hint }) => `${code} ${message}; ${hint}`;

// Under each line what is wrong in it, with a caret at the place.
function problemsUnderLines(mirror) {
  class Said extends mirror.WidgetType {
    constructor(column, text) { super(); this.column = column; this.text = text; }
    eq(other) { return other.column === this.column && other.text === this.text; }
    toDOM() {
      const element = Object.assign(document.createElement("div"), { className: "says" });
      const caret = Object.assign(document.createElement("span"), { className: "caret", textContent: `${" ".repeat(this.column)}^` });
      caret.setAttribute("aria-hidden", "true");
      element.append(caret, this.text);
      return element;
    }
  }
  const under = (doc, diagnostics) => mirror.Decoration.set(diagnostics.flatMap(({ from, message }) => {
    const line = doc.lineAt(from);
    const said = mirror.Decoration.widget({ widget: new Said(from - line.from, message), block: true, side: 1 });
    return [mirror.Decoration.line({ class: "wrong" }).range(line.from), said.range(line.to)];
  }), true);
  return mirror.StateField.define({
    create: () => mirror.Decoration.none,
    update(shown, change) {
      const fresh = change.effects.find((effect) => effect.is(mirror.setDiagnosticsEffect));
      return fresh === undefined ? shown.map(change.changes) : under(change.newDoc, fresh.value);
    },
    provide: (field) => mirror.EditorView.decorations.from(field),
  });
}

function appearance(mirror) {
  const { tags } = mirror;
  const colours = mirror.HighlightStyle.define([
    { tag: [tags.definition(tags.propertyName), tags.propertyName], color: "var(--link)" },
    { tag: tags.string, color: "var(--good)" },
    { tag: tags.comment, color: "var(--soft)", fontStyle: "italic" },
  ]);
  const wavy = { backgroundImage: "none", textDecoration: "underline wavy var(--bad)" };
  return [mirror.syntaxHighlighting(colours), mirror.EditorView.theme({
    "&": { backgroundColor: "var(--card)", color: "var(--ink)", border: "1px solid var(--soft)", borderRadius: "6px", maxHeight: "34rem" },
    "&.cm-focused": { outline: "3px solid var(--link)", outlineOffset: "2px" },
    ".cm-scroller": { font: "13px/1.5 ui-monospace, Menlo, monospace", overflow: "auto", minHeight: "12rem" },
    ".cm-content": { caretColor: "var(--ink)" },
    ".cm-gutters": { backgroundColor: "var(--tint)", color: "var(--soft)", border: "0" },
    ".cm-activeLine": { backgroundColor: "transparent" },
    ".cm-lintRange-error": wavy, ".cm-lintRange-active": { backgroundColor: "transparent" },
    ".wrong": { backgroundColor: "var(--bad-tint) !important" },
    ".says": { backgroundColor: "var(--bad-tint)", color: "var(--bad)", padding: "0 6px", overflowWrap: "anywhere" },
    ".caret": { display: "block", whiteSpace: "pre", overflow: "hidden", lineHeight: "1" },
    ".cm-tooltip, .cm-panels": { backgroundColor: "var(--card)", color: "var(--ink)", border: "1px solid var(--soft)" },
    ".cm-tooltip-autocomplete > ul": { maxWidth: "90vw !important", maxHeight: "none !important", overflow: "hidden !important", fontSize: "13px" },
    ".cm-tooltip-autocomplete > ul > li[aria-selected]": { backgroundColor: "var(--accent)", color: "#fff" },
    ".cm-completionDetail": { color: "inherit" },
    ".cm-completionInfo": { font: "13px/1.4 system-ui, sans-serif" },
  })];
}

for (const field of document.querySelectorAll("textarea[data-editor]")) open(field);
