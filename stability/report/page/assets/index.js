// The list of studies: how long ago each last wrote, and what is chosen for a comparison.
"use strict";
(() => {
  const MOST = 6; // compared at once, as MOST_COMPARED in report/live/server.py
  const UNITS = [["day", 86400], ["hour", 3600], ["minute", 60], ["second", 1]];
  const words = new Intl.RelativeTimeFormat("en", { numeric: "always" });
  const boxes = () => [...document.querySelectorAll("input[name=study]")];

  const tellTimes = () => {
    for (const time of document.querySelectorAll("time[data-at]")) {
      const seconds = Math.max(1, Math.round(Date.now() / 1000 - Number(time.dataset.at)));
      const [unit, size] = UNITS.find(([, size]) => seconds >= size);
      time.textContent = words.format(-Math.floor(seconds / size), unit);
    }
  };

  const offer = () => {
    const chosen = boxes().filter((box) => box.checked).length;
    const button = document.querySelector("button");
    if (!button) return;
    button.disabled = chosen < 2 || chosen > MOST;
    button.textContent = chosen < 2 ? "Choose 2 or more to compare" : chosen > MOST ? `At most ${MOST} can be compared` : `Compare ${chosen} studies`;
  };

  const replace = (next) => {
    const chosen = new Set(boxes().filter((box) => box.checked).map((box) => box.value));
    const focused = document.activeElement?.id;
    document.querySelector("main").replaceWith(document.adoptNode(next.querySelector("main")));
    for (const box of boxes()) box.checked = chosen.has(box.value);
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    show();
  };

  const show = () => {
    tellTimes();
    offer();
  };

  document.addEventListener("change", offer);
  window.addEventListener("pageshow", offer); // a browser that goes back restores what was chosen
  setInterval(tellTimes, 10000);
  window.report = { replace };
  show();
})();
