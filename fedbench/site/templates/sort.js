// A click on a heading sorts its table by that column: by number where both cells begin with one, else by text.
for (const heading of document.querySelectorAll("th")) {
  heading.addEventListener("click", () => {
    const table = heading.closest("table"), body = table.tBodies[0], column = heading.cellIndex;
    const descending = heading.getAttribute("aria-sort") !== "descending";
    const value = (row) => row.cells[column] ? row.cells[column].textContent.trim() : "";
    const rows = [...body.rows].sort((a, b) => {
      const x = parseFloat(value(a).replace(/,/g, "")), y = parseFloat(value(b).replace(/,/g, ""));
      if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
      const order = Number.isNaN(x) ? value(a).localeCompare(value(b)) : x - y;
      return descending ? -order : order;
    });
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    body.append(...rows);
  });
}
