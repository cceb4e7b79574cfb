"use strict";
{
  const data = JSON.parse(document.getElementById("data").textContent);
  const map = document.querySelector(".map");
  const scroll = document.querySelector(".scroll");
  const first = document.getElementById("first");

  const name = (cell) => {
    const row = cell.parentElement.cells[0].querySelector("bdi").textContent;
    return `${row}, ${map.tHead.rows[0].cells[cell.cellIndex].textContent}`;
  };
  const held = (cell) => data[cell.parentElement.sectionRowIndex][cell.cellIndex - 1];
  const says = (cell) => (held(cell) ? held(cell)[0] : "Nothing was measured.");

  const show = (cell) => {
    map.querySelector("[aria-selected]")?.removeAttribute("aria-selected");
    cell.setAttribute("aria-selected", "true");
    document.getElementById("where").textContent = name(cell);
    document.getElementById("says").textContent = says(cell);
    const lines = (held(cell)?.[1] ?? []).map(([key, value]) => {
      const term = document.createElement("dt");
      const text = document.createElement("dd");
      term.textContent = key;
      text.textContent = value;
      return [term, text];
    });
    document.getElementById("facts").replaceChildren(...lines.flat());
  };

  // one cell at a time is a stop of the Tab key; arrows move that stop
  const stop = (cell) => {
    map.querySelector('td[tabindex="0"]').tabIndex = -1;
    cell.tabIndex = 0;
  };

  const target = (cell, event) => {
    const rows = map.tBodies[0].rows;
    const [r, c] = [cell.parentElement.sectionRowIndex, cell.cellIndex];
    const last = cell.parentElement.cells.length - 1;
    const at = {
      ArrowUp: [r - 1, c],
      ArrowDown: [r + 1, c],
      ArrowLeft: [r, c - 1],
      ArrowRight: [r, c + 1],
      PageUp: [Math.max(0, r - 10), c],
      PageDown: [Math.min(rows.length - 1, r + 10), c],
      Home: [event.ctrlKey ? 0 : r, 1],
      End: [event.ctrlKey ? rows.length - 1 : r, last],
    }[event.key];
    return at && at[1] > 0 ? rows[at[0]]?.cells[at[1]] : undefined;
  };

  if (map) {
    const cellOf = (event) => event.target.closest("td[role]");
    const ask = (cell) => {
      stop(cell);
      show(cell);
      document.querySelector("aside").classList.add("asked");
    };
    map.addEventListener("click", (event) => {
      const cell = cellOf(event);
      if (cell) ask(cell);
    });
    map.addEventListener("pointerover", (event) => {
      const cell = cellOf(event);
      if (cell && !cell.title) cell.title = `${name(cell)}\n${says(cell)}`;
    });
    map.addEventListener("keydown", (event) => {
      const cell = cellOf(event);
      if (!cell || event.altKey || event.metaKey) return;
      if (event.key === "Enter" || event.key === " ") {
        ask(cell);
      } else {
        const next = target(cell, event);
        if (!next) return;
        stop(next);
        next.focus();
      }
      event.preventDefault();
    });
  }

  if (first) {
    // the frame scrolls, the page stays at its top
    scroll.scrollTop = first.offsetTop - scroll.clientHeight / 2;
    scroll.scrollLeft = first.offsetLeft - scroll.clientWidth * 0.7;
    show(first);
    document.getElementById("jump").addEventListener("click", (event) => {
      event.preventDefault();
      first.scrollIntoView({ block: "center", inline: "center" });
      stop(first);
      first.focus({ preventScroll: true });
      show(first);
    });
  }
}
