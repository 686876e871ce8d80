"use strict";
(() => {
  const root = document.documentElement;

  // Where scripts do not run, the buttons would do nothing.
  document.querySelector(".tools").hidden = false;

  const theme = document.getElementById("theme");
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : prefersDark.matches);
  const nameTheme = () => { theme.textContent = isDark() ? "Light colours" : "Dark colours"; };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    nameTheme();
  });
  prefersDark.addEventListener("change", nameTheme);
  nameTheme();

  // A cell without a key has nothing to be compared by; it comes last, whichever way the others go.
  const compare = (one, other, numeric, sign) => {
    if (one === undefined || other === undefined) return (one === undefined) - (other === undefined);
    return sign * (numeric ? Number(one) - Number(other) : one.localeCompare(other, "en", { numeric: true }));
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const headers = [...table.tHead.rows[0].cells];
    headers.forEach((header, column) => {
      header.firstChild.addEventListener("click", () => {
        const sign = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
        const numeric = header.classList.contains("number");
        const key = (row) => row.cells[column].dataset.key;
        const body = table.tBodies[0];
        body.append(...[...body.rows].sort((one, other) => compare(key(one), key(other), numeric, sign)));
        for (const each of headers) each.removeAttribute("aria-sort");
        header.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      });
    });
  }

  // Paper cannot be unfolded.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    for (const details of folded) details.open = true;
  });
  addEventListener("afterprint", () => {
    for (const details of folded) details.open = false;
  });
})();
