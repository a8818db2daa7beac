// Pages of rollouts, newest first.

import { h, clock, number, panel, seconds, table, tag, visible } from "../dom.js";
import { get } from "../data.js";

const LIMIT = 50;
const REQUESTS_MOST = 40; // for a page of a rare kind: each reads 20,000 rows of the ledger
const STATES = ["", "planned", "submitted", "running", "generated", "admitted", "batched", "delivered", "trained", "filtered", "dead", "evaluated"];

export async function rolloutsPage(run, query) {
  const page = await filledPage(run, query);
  const linked = (changes) => `#/${run}/rollouts?${new URLSearchParams(Object.entries({ ...query, ...changes }).filter(([, value]) => value))}`;
  const heads = [{ name: "rollout", cls: "nowrap" }, { name: "state" }, { name: "environment" }, { name: "step", n: 1 }, { name: "reward", n: 1 }, { name: "advantage", n: 1 }, { name: "sampled", n: 1 }, { name: "turns", n: 1 }, { name: "version", n: 1 }, { name: "took", n: 1 }, { name: "generated", cls: "nowrap" }];
  const rows = page.rows.map((row) => [
    h("a", { href: `#/${run}/rollout/${row.id}` }, row.id),
    tag(row.state, row.reason ? visible(row.reason) : row.state),
    h("a", { href: linked({ environment: row.environment, before: "" }) }, visible(row.environment)),
    row.step === null ? "–" : h("a", { href: linked({ step: row.step, before: "" }) }, String(row.step)),
    number(row.reward), number(row.advantage), number(row.completion_tokens), number(row.turns), versions(row), seconds(row.duration_s), clock(row.generated_at),
  ]);
  return {
    content: [
      h("div", { cls: "title" }, h("h1", {}, "Rollouts"), h("span", { cls: "muted" }, filterText(query))),
      filters(query, linked),
      panel(null, rows.length ? table(heads, rows) : h("p", { cls: "muted" }, "No rollout matches."),
        h("div", { cls: "pager" },
          query.before ? h("a", { href: linked({ before: "" }) }, "← Newest") : null,
          page.next ? h("a", { href: linked({ before: page.next }), id: "older" }, "Older →") : h("span", { cls: "muted" }, rows.length ? "These are the oldest." : ""))),
    ],
  };
}

// A request reads a bounded part of the ledger, so that several may be needed for one page of a rare kind.
async function filledPage(run, query) {
  const page = { rows: [], next: query.before || null };
  for (let request = 0; request < REQUESTS_MOST && page.rows.length < LIMIT; request++) {
    const part = await get(`runs/${run}/rollouts`, { ...query, before: page.next, limit: LIMIT - page.rows.length });
    page.rows.push(...part.rows);
    page.next = part.next;
    if (!part.next) break;
  }
  return page;
}

function filterText(query) {
  const parts = [query.state, query.reason, query.step && `of step ${query.step}`, query.environment && `of ${query.environment}`, query.generated === "false" && "lost before they were generated"];
  return parts.filter(Boolean).map(visible).join(", ") || "newest first";
}

function filters(query, linked) {
  const go = (changes) => { location.hash = linked({ ...changes, before: "" }); };
  const state = h("select", { "aria-label": "State", onchange: (event) => go({ state: event.target.value, reason: "" }) }, STATES.map((name) => h("option", { value: name, selected: (query.state || "") === name }, name || "any state")));
  const step = h("input", { type: "number", min: 0, placeholder: "step", "aria-label": "Step", value: query.step || "", onchange: (event) => go({ step: event.target.value }) });
  const active = Object.keys(query).some((name) => name !== "before" && query[name]);
  return h("div", { cls: "filters" }, state, step, active ? h("a", { href: linked({ state: "", reason: "", step: "", environment: "", generated: "", before: "" }) }, "Clear filters") : null);
}

function versions(row) {
  if (row.version_first === null) return "–";
  return row.version_first === row.version_last ? String(row.version_first) : `${row.version_first}–${row.version_last}`;
}
