// The frame: runs, pages by address, the banner, and live updates.

import { h, replace, visible } from "./dom.js";
import { get, isReport } from "./data.js";
import { overviewPage } from "./pages/overview.js";
import { waterfallPage } from "./pages/waterfall.js";
import { rolloutsPage } from "./pages/rollouts.js";
import { groupPage } from "./pages/group.js";
import { rolloutPage } from "./pages/rollout.js";
import { comparePage } from "./pages/compare.js";

const LIVE_MS = 2000, IDLE_MS = 15000, AGAIN_MS = 150;
const PAGES = {
  overview: (run, id, query) => overviewPage(run, query),
  waterfall: (run, id, query) => waterfallPage(run, query, refresh),
  rollouts: (run, id, query) => rolloutsPage(run, query),
  group: (run, id, query) => groupPage(run, id, query),
  rollout: (run, id) => rolloutPage(run, id),
  compare: (run, id, query) => comparePage(run, query, refresh, runs),
};
const TABS = [["overview", "Overview"], ["waterfall", "Waterfall"], ["rollouts", "Rollouts"], ["compare", "Compare"]];
const LIVE = new Set(["overview", "waterfall"]);

let runs = [], shown = null, timer = null, drawing = 0;

function place() {
  const [path, words] = location.hash.replace(/^#\/?/, "").split("?");
  const [run, page, id] = path.split("/");
  return { run: Math.min(Number(run) || 0, Math.max(0, runs.length - 1)), page: PAGES[page] ? page : "overview", id, query: Object.fromEntries(new URLSearchParams(words || "")) };
}

async function refresh() {
  clearTimeout(timer);
  const own = ++drawing, main = document.getElementById("main");
  let again = null, at = place(), address = location.hash;
  try {
    if (!runs.length) runs = (await get("runs")).runs;
    at = place(), address = location.hash;
    const [list, page] = await Promise.all([get("runs"), PAGES[at.page](at.run, at.id, at.query)]);
    if (own !== drawing) return;
    runs = list.runs;
    const focus = shown === address ? focused() : null, scrolled = scrolls();
    replace(main, page.content, footer());
    if (shown !== address) window.scrollTo(0, 0); else scrolled();
    shown = address;
    focus?.();
    frame(at, page.view);
    const live = runs[at.run]?.state === "running" || runs[at.run]?.state === "starting";
    again = page.again ? AGAIN_MS : LIVE.has(at.page) ? (live ? LIVE_MS : IDLE_MS) : null;
  } catch (error) {
    if (own !== drawing) return;
    replace(main, h("p", { role: "alert" }, visible(error.message)));
    frame(at, null);
    again = IDLE_MS / 3;
    shown = null;
  }
  document.documentElement.dataset.drawn = address;
  if (again !== null && !isReport()) timer = setTimeout(() => (document.hidden ? document.addEventListener("visibilitychange", refresh, { once: true }) : refresh()), again);
}

// A redrawn page keeps the focus: on the element at the same place among those that can have it.
function focused() {
  const all = [...document.querySelectorAll("#main a, #main button, #main [tabindex], #main input, #main select")];
  const at = all.indexOf(document.activeElement);
  return at < 0 ? null : () => document.querySelectorAll("#main a, #main button, #main [tabindex], #main input, #main select")[at]?.focus({ preventScroll: true });
}

function scrolls() {
  const at = [...document.querySelectorAll("#main .scroll")].map((one) => one.scrollLeft);
  return () => document.querySelectorAll("#main .scroll").forEach((one, place) => { one.scrollLeft = at[place] || 0; });
}

function frame(at, view) {
  const run = runs[at.run];
  const picker = runs.length > 1 ? h("select", { "aria-label": "Run", onchange: (event) => { location.hash = `#/${event.target.value}/${at.page === "compare" ? "compare" : "overview"}`; } }, runs.map((one, number) => h("option", { value: number, selected: number === at.run }, visible(one.name)))) : h("span", {}, run ? visible(run.name) : "");
  replace(document.getElementById("top"), h("span", { cls: "brand" }, "Headpond"), picker,
    h("nav", { "aria-label": "Pages" }, TABS.map(([page, text]) => h("a", { href: `#/${at.run}/${page}`, "aria-current": page === at.page || (page === "rollouts" && (at.page === "group" || at.page === "rollout")) ? "page" : null }, page === "compare" && runs.length < 2 ? "Settings" : text))),
    h("span", { cls: "spacer" }), run ? h("span", { cls: `pill ${run.state}` }, isReport() ? `report, run was ${run.state}` : run.state) : null);
  document.title = run ? `${run.name} · Headpond` : "Headpond";
  if (view && view.state !== "running") banner(at.run, view.waiting_for);
  get(`runs/${at.run}/why`).then((why) => { if (place().run === at.run) banner(at.run, why.causes); }, () => {});
}

function banner(run, lines) {
  const element = document.getElementById("banner");
  element.className = runs[run]?.state === "stopped" || runs[run]?.state === "silent" ? "bad" : "";
  const key = lines.join("\n");
  if (element.dataset.key === key) return;
  element.dataset.key = key;
  replace(element, lines.length ? h("ul", {}, lines.slice(0, 6).map((line) => h("li", {}, h("b", {}, "waits for"), visible(line)))) : null);
}

function footer() {
  const paint = performance.getEntriesByName("first-contentful-paint")[0];
  if (paint) document.documentElement.dataset.firstPaintMs = paint.startTime.toFixed(0);
  return h("footer", {}, isReport() ? "A report of `headpond report`." : "Read-only. Live while the run is.");
}

addEventListener("hashchange", () => { refresh(); document.getElementById("main").focus({ preventScroll: true }); });
refresh();
