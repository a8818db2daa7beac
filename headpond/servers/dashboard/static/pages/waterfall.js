// From planned to trained, and where rollouts were lost.

import { h, number, panel, seconds, segmented, visible } from "../dom.js";
import { get } from "../data.js";

const UNITS = { rollouts: ["rollouts", number], tokens: ["sampled tokens", number], seconds: ["engine-seconds", seconds] };
let unit = "rollouts";

export async function waterfallPage(run, query, refresh) {
  const fall = await get(`runs/${run}/waterfall`);
  const choose = (key) => { unit = key; refresh(); };
  return {
    again: fall.read_share < 1,
    content: [
      h("div", { cls: "title" }, h("h1", {}, "Waterfall"), segmented("Unit", Object.entries(UNITS).map(([key, [text]]) => [key, text]), unit, choose),
        h("span", { cls: "muted" }, fall.read_share < 1 ? `${Math.floor(100 * fall.read_share)}% of the ledger is summed` : explained())),
      panel(null, h("div", { cls: "fall" }, fall.stages.map((stage) => row(stage, fall.stages[0][unit], run)))),
    ],
  };
}

function explained() {
  return { rollouts: "", tokens: "of rollouts that have a result", seconds: "that the requests of the turns took, of rollouts that have a result" }[unit];
}

function row(stage, all, run) {
  const format = UNITS[unit][1];
  const share = (value) => (all ? (100 * value) / all : 0);
  const lost = stage.lost.reduce((sum, one) => sum + one[unit], 0);
  const waiting = stage.waiting[unit];
  const passed = Math.max(0, stage[unit] - waiting - lost);
  return [
    h("div", { cls: "stage" }, stage.name),
    h("div", { cls: "mid" },
      h("div", { cls: "track", role: "img", "aria-label": `${stage.name}: ${format(stage[unit])}, ${format(waiting)} waiting, ${format(lost)} lost` },
        h("div", { cls: "on", "width%": share(passed) }), h("div", { cls: "wait", "width%": share(waiting) }),
        stage.lost.map((one) => h("div", { cls: one.state === "dead" ? "dead" : "lost", title: one.reason || one.state, "width%": share(one[unit]) }))),
      h("div", { cls: "losses" },
        stage.waiting.rollouts ? h("span", { cls: "loss wait" }, h("b", {}, format(waiting)), " waiting") : null,
        stage.lost.map((one) => h("a", { cls: `loss ${one.state}`, href: `#/${run}/rollouts?${losses(one)}` }, h("b", {}, format(one[unit])), ` ${visible(one.reason || one.state)}`)))),
    h("div", { cls: "amount" }, format(stage[unit]), h("small", {}, all ? `${share(stage[unit]).toFixed(1)}%` : "")),
  ];
}

function losses(one) {
  const words = new URLSearchParams({ state: one.state });
  if (one.reason) words.set("reason", one.reason);
  if (!one.generated) words.set("generated", "false");
  return words;
}
