// Light or dark: what the reader chose last, else what the system says. Loaded before the page is drawn.
(() => {
  const root = document.documentElement;
  const read = () => { try { return localStorage.getItem("kvcustody-theme"); } catch { return null; } };
  const chosen = read();
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  document.addEventListener("click", (event) => {
    if (!(event.target instanceof Element) || event.target.closest("#theme") === null) return;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("kvcustody-theme", root.dataset.theme); } catch { /* it lasts for this page */ }
  });
})();
