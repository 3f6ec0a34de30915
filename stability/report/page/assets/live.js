// Keeps a served page up to date: asks for the stamp of its records, and fetches the page when that
// has changed. `window.report.replace(page)`, where a page has it, puts the new content in place.
"use strict";
(() => {
  const SOONEST = 2000; // ms between two looks
  const LATEST = 30000; // ms, once the server is gone
  const SHARE = 10; // what took a second is asked again after so many: training needs the cores
  const bar = document.getElementById("live");
  const says = bar.querySelector("[role=status]");
  const stampOf = location.pathname.replace(/\/?$/, "/stamp") + location.search;
  let shown = bar.dataset.stamp;
  let since = new Date();
  let wait = SOONEST;
  let timer = 0;

  const clock = (time) => time.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
  const say = (text, gone = false) => {
    if (says.textContent !== text) says.textContent = text; // told once by a screen reader
    bar.classList.toggle("gone", gone);
  };

  const ask = async (address) => {
    const answer = await fetch(address, { cache: "no-store" }).catch(() => {
      throw new Error("the server has stopped");
    });
    if (answer.status === 403) throw new Error("this is another server now: open the address that it printed");
    if (answer.status === 404) throw new Error("these records are no longer there");
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    return answer.text();
  };

  const renew = async () => {
    const next = new DOMParser().parseFromString(await ask(location.href), "text/html");
    const hasFigures = (page) => page.getElementById("data") !== null;
    // a study that could not be read has another page than one that can
    if (!window.report?.replace || hasFigures(next) !== hasFigures(document)) return location.reload();
    await window.report.replace(next);
    document.title = next.title;
    shown = next.getElementById("live").dataset.stamp;
  };

  const look = async () => {
    const start = performance.now();
    try {
      if ((await ask(stampOf)) !== shown) await renew();
      since = new Date();
      wait = Math.max(SOONEST, SHARE * (performance.now() - start));
      say("live: follows the records");
    } catch (error) {
      wait = Math.min(2 * wait, LATEST);
      say(`${error.message}; this is the state of ${clock(since)}`, true);
    }
    rest();
  };

  const rest = () => {
    clearTimeout(timer);
    if (!document.hidden) timer = setTimeout(look, wait);
  };

  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : look()));
  say("live: follows the records");
  rest();
})();
