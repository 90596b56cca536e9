"use strict";
// The parts of a picture: pointing at one tells what it is, arrow keys walk through them.
for (const picture of document.querySelectorAll("[data-cells]")) {
  const info = document.getElementById(picture.dataset.cells);
  const cells = [...picture.querySelectorAll("[data-info]")];
  if (!cells.length) continue;
  cells[0].setAttribute("tabindex", "0");
  const cellOf = (event) => event.target.closest("[data-info]");
  const tell = (event) => {
    const cell = cellOf(event);
    if (cell) info.textContent = cell.dataset.info;
  };
  picture.addEventListener("pointerover", tell);
  picture.addEventListener("focusin", tell);
  picture.addEventListener("keydown", (event) => {
    const at = cells.indexOf(cellOf(event));
    const last = cells.length - 1;
    const to = {
      ArrowRight: Math.min(at + 1, last), ArrowDown: Math.min(at + 1, last),
      ArrowLeft: Math.max(at - 1, 0), ArrowUp: Math.max(at - 1, 0),
      Home: 0, End: last,
    }[event.key];
    if (at < 0 || to === undefined) return;
    event.preventDefault();
    cells[at].setAttribute("tabindex", "-1");
    cells[to].setAttribute("tabindex", "0");
    cells[to].focus();
  });
}
