// The rollouts of one example side by side.

import { h, clock, number, panel, table, tag, visible } from "../dom.js";
import { get } from "../data.js";
import { conversationView } from "./conversation.js";

const COMPARED = 4; // conversations that are loaded at once

export async function groupPage(run, id, query) {
  const group = await get(`runs/${run}/groups/${id}`);
  const chosen = query.show ? query.show.split(",").map(Number) : group.rollouts.slice(0, COMPARED).map((one) => one.index);
  const shown = group.rollouts.filter((one) => chosen.includes(one.index)).slice(0, 2 * COMPARED);
  const texts = await Promise.all(shown.map((one) => get(`runs/${run}/rollouts/${one.id}/conversation`)));
  return {
    content: [
      h("div", { cls: "title" }, h("h1", {}, `Group ${id}`), h("span", { cls: "muted" }, `${visible(group.environment)}, example ${group.example}`)),
      panel("Rollouts", overview(run, id, group, chosen)),
      panel("Conversations", h("p", { cls: "muted" }, "What differs from the first column is marked."), h("div", { cls: "columns" }, shown.map((one, at) => column(run, one, texts[at], at ? texts[0] : null)))),
      group.events.length ? panel("Events", table([{ name: "at", cls: "nowrap" }, { name: "of" }, { name: "what" }, { name: "detail" }], group.events.map((event) => [clock(event.at), event.subject, event.action, visible(event.detail)]))) : null,
    ],
  };
}

function overview(run, id, group, chosen) {
  const bars = (name) => {
    const most = Math.max(1e-9, ...group.rollouts.map((one) => Math.abs(one[name] ?? 0)));
    return (one) => h("span", {}, h("span", { cls: (one[name] ?? 0) < 0 ? "bar neg" : "bar", "width%": (50 * Math.abs(one[name] ?? 0)) / most }), ` ${number(one[name])}`);
  };
  const reward = bars("reward"), advantage = bars("advantage"), length = bars("completion_tokens");
  const toggled = (index) => (chosen.includes(index) ? chosen.filter((one) => one !== index) : [...chosen, index]);
  const heads = [{ name: "show" }, { name: "rollout", cls: "nowrap" }, { name: "state" }, { name: "reward", cls: "nowrap" }, { name: "advantage", cls: "nowrap" }, { name: "sampled tokens", cls: "nowrap" }, { name: "turns", n: 1 }];
  return table(heads, group.rollouts.map((one) => [
    h("input", { type: "checkbox", checked: chosen.includes(one.index), "aria-label": `show ${one.id}`, onchange: () => { location.hash = `#/${run}/group/${id}?show=${toggled(one.index).join(",")}`; } }),
    h("a", { href: `#/${run}/rollout/${one.id}` }, one.id), tag(one.state, one.reason ? visible(one.reason) : one.state), reward(one), advantage(one), length(one), number(one.turns),
  ]));
}

function column(run, rollout, found, first) {
  const other = first?.kept ? first.conversations[0] || [] : null;
  return h("div", {},
    h("div", {}, h("a", { href: `#/${run}/rollout/${rollout.id}` }, rollout.id), ` reward ${number(rollout.reward)}`),
    rollout.error ? h("p", {}, visible(rollout.error)) : null,
    found.kept ? found.conversations.slice(0, 1).map((messages) => conversationView(run, rollout.id, messages, 0, other)) : h("p", { cls: "muted" }, visible(found.why)));
}
