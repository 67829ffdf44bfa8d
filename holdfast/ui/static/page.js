/* Refreshes the page, sorts tables and handles the keyboard; links and forms work without this script. */
"use strict";

const follow_s = Number(document.body.dataset.follow);

function isBusy() {
  return document.activeElement?.matches("main input, main select") || !getSelection().isCollapsed;
}

/* The column and direction by which the user sorted each table, which a refresh keeps. */
const sorted = new Map();

function valueOf(row, column) {
  const cell = row.cells[column];
  const text = cell?.dataset.v ?? cell?.querySelector("time")?.dateTime ?? cell?.textContent.trim() ?? "";
  const number = Number(text.replaceAll(",", ""));
  return text !== "" && !Number.isNaN(number) ? number : text;
}

function compare(a, b) {
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return typeof a === "number" ? a - b : a.localeCompare(b);
}

function sort(table, column, direction) {
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => [valueOf(row, column), row]);
  rows.sort(([a], [b]) => compare(a, b) * (direction === "ascending" ? 1 : -1));
  body.append(...rows.map(([, row]) => row));
  for (const head of table.tHead.rows[0].cells) head.removeAttribute("aria-sort");
  table.tHead.rows[0].cells[column].setAttribute("aria-sort", direction);
}

function makeSortable() {
  for (const table of document.querySelectorAll("main table")) {
    if (table.tBodies.length !== 1 || table.tBodies[0].rows.length < 2 || table.querySelector("tbody [colspan]")) continue;
    const name = table.parentElement.getAttribute("aria-label");
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const direction = head.getAttribute("aria-sort") === "descending" ? "ascending" : "descending";
        sorted.set(name, [column, direction]);
        sort(table, column, direction);
      });
    });
    if (sorted.has(name)) sort(table, ...sorted.get(name));
  }
}
makeSortable();

/* Return the number of a column heading, counted from 1 over all tables; 0 for other elements. */
function headingOf(element) {
  return [...document.querySelectorAll("main th button")].indexOf(element) + 1;
}

/* Replace the content with that of a newer page, and restore the focus. */
async function refresh() {
  if (document.hidden || isBusy()) return;
  const status = document.getElementById("status");
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const main = page.querySelector("main");
    if (!main) throw new Error("not this page");  /* a different server, or this server restarted with a new token */
    if (isBusy()) return;  /* a slow response takes seconds */
    const focused = document.activeElement?.getAttribute("href");
    const opened = [...document.querySelectorAll("main details")].map((one) => one.open);
    const pressed = headingOf(document.activeElement);
    document.querySelector("main").replaceWith(main);
    makeSortable();
    if (pressed) document.querySelectorAll("main th button")[pressed - 1]?.focus({ preventScroll: true });
    document.querySelectorAll("main details").forEach((one, i) => { one.open = opened[i] ?? one.open; });
    if (focused) document.querySelector(`main a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    status.textContent = "";
  } catch {
    status.textContent = "The server is not responding; this page is out of date.";
  }
}
if (follow_s) setInterval(refresh, follow_s * 1000);

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const cell = event.target.closest?.(".map a");
  if (event.key === "/") {
    const field = document.querySelector("input[type=search]");
    if (field) { event.preventDefault(); field.focus(); }
  } else if (cell && event.key.startsWith("Arrow")) {
    const cells = [...cell.closest(".map").querySelectorAll("a")];
    const at = cells.indexOf(cell), top = cell.getBoundingClientRect().top;
    const wide = cells.filter((one) => one.getBoundingClientRect().top === cells[0].getBoundingClientRect().top).length;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -wide, ArrowDown: wide }[event.key];
    event.preventDefault();
    cells[at + step]?.focus();
  }
});

/* A slider that was not moved asks for the last micro-batch, which may be newer than the one shown. */
document.addEventListener("submit", (event) => {
  const slider = event.target.querySelector("input[type=range][data-latest]");
  if (slider && slider.value === slider.defaultValue) slider.disabled = true;
});

/* Show the value of a slider while it moves. */
document.addEventListener("input", (event) => {
  if (event.target.matches("input[type=range]")) {
    document.getElementById(event.target.dataset.shown).textContent = event.target.value;
  }
});
document.addEventListener("change", (event) => {
  if (event.target.matches("input[type=range]")) event.target.form.requestSubmit();
});
