/* What the page does beyond links and forms, all of which work without it: it follows, and listens to the keyboard. */
"use strict";

const follow_s = Number(document.body.dataset.follow);

function isBusy() {
  return document.activeElement?.matches("main input, main select") || !getSelection().isCollapsed;
}

/* Put the content of a newer page in the place of this one's, and the focus where it was. */
async function refresh() {
  if (document.hidden || isBusy()) return;
  const said = document.getElementById("said");
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const main = page.querySelector("main");
    if (!main) throw new Error("no page of ours");  /* another server, or this one begun anew, with another token */
    if (isBusy()) return;  /* by now: a slow server takes seconds */
    const focused = document.activeElement?.getAttribute("href");
    const opened = [...document.querySelectorAll("main details")].map((one) => one.open);
    document.querySelector("main").replaceWith(main);
    document.querySelectorAll("main details").forEach((one, i) => { one.open = opened[i] ?? one.open; });
    if (focused) document.querySelector(`main a[href="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    said.textContent = "";
  } catch {
    said.textContent = "The server does not answer: what is shown is old.";
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

/* Whoever has not moved the slider stays with the last micro-batch, whichever that will be. */
document.addEventListener("submit", (event) => {
  const slider = event.target.querySelector("input[type=range][data-latest]");
  if (slider && slider.value === slider.defaultValue) slider.disabled = true;
});

/* The number beside a slider, while it is moved. */
document.addEventListener("input", (event) => {
  if (event.target.matches("input[type=range]")) {
    document.getElementById(event.target.dataset.shown).textContent = event.target.value;
  }
});
document.addEventListener("change", (event) => {
  if (event.target.matches("input[type=range]")) event.target.form.requestSubmit();
});
