"use strict";
const byName = new Intl.Collator("en", { numeric: true });
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const body = table.tBodies[0], headings = [...table.tHead.rows[0].cells], original = [...body.rows];
  headings.forEach((heading, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    const key = (row) => row.cells[column].dataset.value;
    // Figures begin with the largest, names with A; a third press restores the order of the run.
    const orders = column ? ["descending", "ascending", null] : ["ascending", "descending", null];
    button.addEventListener("click", () => {
      const order = orders[(orders.indexOf(heading.getAttribute("aria-sort")) + 1) % 3];
      headings.forEach((each) => each.removeAttribute("aria-sort"));
      if (order) heading.setAttribute("aria-sort", order);
      const sign = order === "descending" ? -1 : 1;
      const compare = (a, b) => {
        if (!column) return sign * byName.compare(a.cells[0].textContent, b.cells[0].textContent);
        const [x, y] = [key(a), key(b)];
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        return sign * (isNaN(x) ? x.localeCompare(y) : x - y);
      };
      body.append(...(order ? [...original].sort(compare) : original));
    });
  });
}
