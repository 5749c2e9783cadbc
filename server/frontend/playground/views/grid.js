// --- tables of numbers: coloured, with a line that says what a cell is, for pointers and for the arrow keys ---

const heat = (value) => `${Math.round(100 * Math.min(1, Math.max(0, value)))}%`;
const decimals = (value) => value.toFixed(2).replace("-0.00", "0.00");
const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], Home: [0, -Infinity], End: [0, Infinity] };

function drawGrid(table, columns, rows, values, { say, digits = decimals, marked = () => false }) {
  // `columns` and `rows` are header cells (a row may have several), `values` an array a row
  const head = make("tr");
  head.append(...columns);
  const body = values.map((numbers, i) => {
    const row = make("tr");
    row.append(...rows[i]);
    numbers.forEach((value, j) => {
      const cell = make("td", digits(value), { "data-row": i, "data-column": j, tabindex: -1 });
      cell.style.setProperty("--heat", heat(value));
      if (marked(i, j)) cell.className = "best";
      row.append(cell);
    });
    return row;
  });
  const [thead, tbody] = [make("thead"), make("tbody")];
  thead.append(head);
  tbody.append(...body);
  table.replaceChildren(table.caption, thead, tbody);

  let current = tbody.querySelector("[data-row]");
  current.tabIndex = 0;
  const point = (cell) => {
    if (!cell.dataset.row) return;
    current.classList.remove("on");
    current.tabIndex = -1;
    current = cell;
    cell.tabIndex = 0;
    cell.classList.add("on");
    say(Number(cell.dataset.row), Number(cell.dataset.column));
  };
  const nearest = (at, most) => Math.min(most, Math.max(0, at));
  tbody.onpointerover = ({ target }) => point(target);
  tbody.onkeydown = (event) => {
    const step = STEPS[event.key];
    if (!step || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    const row = nearest(Number(current.dataset.row) + step[0], values.length - 1);
    const column = nearest(Number(current.dataset.column) + step[1], values[row].length - 1);
    tbody.querySelector(`[data-row="${row}"][data-column="${column}"]`).focus();
  };
  tbody.addEventListener("focusin", ({ target }) => point(target));
}
