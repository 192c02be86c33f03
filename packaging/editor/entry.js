// What the console's editor takes from CodeMirror; `make editor` bundles it into console/web/static/codemirror.js.
export { EditorState, StateField } from "@codemirror/state";
export { Decoration, EditorView, WidgetType, highlightActiveLine, keymap, lineNumbers } from "@codemirror/view";
export { defaultKeymap, history, historyKeymap } from "@codemirror/commands";
export {
  acceptCompletion, autocompletion, closeBrackets, closeBracketsKeymap, completionKeymap,
} from "@codemirror/autocomplete";
export { linter, lintKeymap, setDiagnosticsEffect } from "@codemirror/lint";
export { searchKeymap } from "@codemirror/search";
export { HighlightStyle, indentUnit, syntaxHighlighting } from "@codemirror/language";
export { tags } from "@lezer/highlight";
export { yaml, yamlLanguage } from "@codemirror/lang-yaml";
