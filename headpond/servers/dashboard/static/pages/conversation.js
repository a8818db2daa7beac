// Messages as text, and where two texts differ.

import { h, visible } from "../dom.js";
import { get } from "../data.js";

const WORDS_MOST = 1500; // of a pair of texts that are compared word by word: 2 million cells, 30 ms

// `other`: the messages of another rollout; what is not in them is marked.
export function conversationView(run, rollout, messages, number, other = null) {
  return messages.map((message, at) => h("div", { cls: `message ${/^[a-z]+$/.test(message.role) ? message.role : ""}` },
    h("div", { cls: "role" }, visible(message.role)),
    message.parts.length ? null : h("div", { cls: "muted" }, "no text"),
    message.parts.map((part) => partView(run, rollout, number, at, part, other ? other[at]?.parts.find((one) => one.name === part.name)?.text ?? "" : null))));
}

function partView(run, rollout, conversation, message, part, other) {
  const shown = h("div", { cls: "text" }, other === null ? visible(part.text) : marked(part.text, other));
  let start = [...part.text].length; // characters, as the server counts them
  const rest = part.length > start ? h("button", { type: "button" }, `Show more of ${part.length.toLocaleString("en")} characters`) : null;
  rest?.addEventListener("click", async () => {
    rest.disabled = true;
    const more = await get(`runs/${run}/rollouts/${rollout}/part`, { conversation, message, name: part.name, start });
    shown.append(visible(more.text));
    start += [...more.text].length;
    rest.disabled = false;
    if (start >= more.length || !more.text) rest.remove();
  });
  return [part.name === "content" ? null : h("div", { cls: "part" }, visible(part.name)), shown, rest];
}

export function marked(text, other) {
  if (text === other) return [visible(text)];
  const own = text.split(/(\s+)/), others = other.split(/(\s+)/);
  let first = 0;
  while (first < own.length && first < others.length && own[first] === others[first]) first++;
  let last = 0;
  while (last < own.length - first && last < others.length - first && own[own.length - 1 - last] === others[others.length - 1 - last]) last++;
  const middle = own.slice(first, own.length - last);
  const same = inCommon(middle, others.slice(first, others.length - last));
  const pieces = [visible(own.slice(0, first).join(""))];
  let at = 0;
  while (at < middle.length) {
    let end = at;
    while (end < middle.length && same[end] === same[at]) end++;
    const words = visible(middle.slice(at, end).join(""));
    pieces.push(same[at] ? words : h("mark", { cls: "differs" }, words));
    at = end;
  }
  pieces.push(visible(last ? own.slice(own.length - last).join("") : ""));
  return pieces;
}

// For each word of `one`, whether it belongs to the longest common subsequence; of long texts none does.
function inCommon(one, other) {
  const same = new Array(one.length).fill(false);
  if (!one.length || !other.length || one.length > WORDS_MOST || other.length > WORDS_MOST) return same;
  const width = other.length + 1;
  const lengths = new Uint16Array((one.length + 1) * width);
  for (let a = one.length - 1; a >= 0; a--) {
    for (let b = other.length - 1; b >= 0; b--) {
      lengths[a * width + b] = one[a] === other[b] ? lengths[(a + 1) * width + b + 1] + 1 : Math.max(lengths[(a + 1) * width + b], lengths[a * width + b + 1]);
    }
  }
  for (let a = 0, b = 0; a < one.length && b < other.length;) {
    if (one[a] === other[b]) { same[a] = true; a++; b++; } else if (lengths[(a + 1) * width + b] >= lengths[a * width + b + 1]) a++; else b++;
  }
  return same;
}
