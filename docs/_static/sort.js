// A click on a heading sorts its table by that column: by number where both cells begin with one, else by text. Rows stay in
// their part of the table, below what names it.
for (const heading of document.querySelectorAll("thead th")) {
  heading.addEventListener("click", () => {
    const table = heading.closest("table"), column = heading.cellIndex;
    const descending = heading.getAttribute("aria-sort") !== "descending";
    const value = (row) => row.cells[column] ? row.cells[column].textContent.trim() : "";
    const order = (a, b) => {
      const x = parseFloat(value(a).replace(/,/g, "")), y = parseFloat(value(b).replace(/,/g, ""));
      if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
      const apart = Number.isNaN(x) ? value(a).localeCompare(value(b)) : x - y;
      return descending ? -apart : apart;
    };
    for (const body of table.tBodies) body.append(...[...body.rows].filter((row) => row.querySelector("td")).sort(order));
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
  });
}
