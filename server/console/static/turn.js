// One question of the playground and its answer: tokens with their probabilities, calls, figures and code.
import { figures, milliseconds } from "/stream.js";
import { curl, python } from "./snippets.js";

/** A template's element, and its parts by the names in data-field. */
export function fromTemplate(id) {
  const root = document.getElementById(id).content.firstElementChild.cloneNode(true);
  const parts = [...root.querySelectorAll("[data-field]")].map((element) => [element.dataset.field, element]);
  return { root, ...Object.fromEntries(parts) };
}

export class Turn {
  #shown = fromTemplate("turn");
  #startedAt = performance.now();
  #firstAt;
  #lastAt;
  #decoder = new TextDecoder("utf-8", { ignoreBOM: true });
  #tokens = []; // that have come, and whose text has not
  #calls = [];
  #text = "";

  /** body: what is asked, without the fields that make the answer a stream. */
  constructor(question, body) {
    this.#shown.question.textContent = question;
    this.#shown.curl.textContent = curl(location.origin, body);
    this.#shown.python.textContent = python(location.origin, body);
  }

  get root() { return this.#shown.root; }

  /** Show what a chunk of the stream has. */
  take({ choices: [choice], usage }) {
    const { first, tokens, speed, cost, end } = this.#shown;
    if (usage) [tokens.textContent, speed.textContent, cost.textContent] = figures(usage, this.#lastAt - this.#firstAt);
    if (!choice) return;
    this.#lastAt = performance.now();
    this.#firstAt ??= this.#lastAt;
    first.textContent = milliseconds(this.#firstAt - this.#startedAt);
    for (const token of choice.logprobs?.content ?? []) {
      const text = this.#decoder.decode(Uint8Array.from(token.bytes ?? []), { stream: true });
      this.#tokens.push({ ...token, text });
    }
    for (const name of ["reasoning_content", "content"]) this.#append(this.#shown[name], choice.delta[name] ?? "");
    this.#text += choice.delta.content ?? "";
    for (const part of choice.delta.tool_calls ?? []) this.#takeCall(part);
    if (choice.finish_reason) {
      end.textContent = [choice.finish_reason, choice.x_chorale?.stop_cause].filter(Boolean).join(", ");
      if (choice.finish_reason !== "tool_calls") this.#dropCalls();
    }
  }

  /** Show that the answer has ended.   fault: what went wrong, if anything did. */
  end(fault = "") {
    if (fault) this.#dropCalls();
    this.#shown.fault.append(fault);
    this.root.ariaBusy = "false";
  }

  /** The answer as a message of the conversation. */
  get message() {
    const calls = this.#calls.map(({ id, name, args }) => ({ id, type: "function", function: { name, arguments: args } }));
    return { role: "assistant", content: this.#text || (calls.length ? null : ""), ...(calls.length && { tool_calls: calls }) };
  }

  /** The results of the calls that have been filled in, as messages. */
  get results() {
    const filled = this.#calls.filter(({ shown }) => shown.result.value);
    return filled.map(({ id, shown }) => ({ role: "tool", tool_call_id: id, content: shown.result.value }));
  }

  /** Show text by the tokens that it is of. Tokens of which nothing is shown, such as marks, are passed over. */
  #append(place, text) {
    if (!text) return;
    const from = this.#tokens.findIndex((_, i) => this.#tokens.slice(i).map((it) => it.text).join("").startsWith(text));
    this.#tokens.splice(0, from < 0 ? this.#tokens.length : from);
    while (text && this.#tokens.length) {
      const [token] = this.#tokens, part = token.text.slice(0, text.length);
      if (part) place.append(tokenSpan(part, token, !place.firstElementChild));
      text = text.slice(part.length);
      token.text = token.text.slice(part.length);
      if (!token.text) this.#tokens.shift();
    }
    place.append(text);
  }

  #takeCall({ index, id, function: { name, arguments: args = "" } }) {
    this.#tokens = [];
    const call = this.#calls[index] ??= { id, name, args: "", shown: fromTemplate("call") };
    call.args += args;
    call.shown.name.textContent = call.name;
    call.shown.arguments.textContent = call.args;
    this.#shown.calls.append(call.shown.root);
  }

  /** Calls that were cut off are none. */
  #dropCalls() {
    if (this.#calls.length) this.#shown.fault.append("The call of a tool was cut off. ");
    for (const { shown } of this.#calls) shown.result.parentElement.remove();
    this.#calls = [];
  }
}

// ---- probabilities ----
const named = new WeakMap(); // the token of each span
const box = document.getElementById("likely");

/** isFirst: whether Tab leads to it; from there, arrows lead to the others. */
function tokenSpan(text, token, isFirst) {
  const span = Object.assign(document.createElement("span"), { className: "token", textContent: text, tabIndex: isFirst ? 0 : -1 });
  span.classList.toggle("unlikely", token.logprob < Math.log(0.5));
  span.setAttribute("aria-describedby", box.id);
  named.set(span, token);
  return span;
}

/** Percent, rounded down, so that a list of them never adds up to more than 100. */
function percent(logprob) {
  const hundredths = Math.floor(Math.exp(logprob) * 1e4);
  return hundredths ? `${(hundredths / 100).toFixed(2)} %` : "< 0.01 %";
}

function show({ target }) {
  const token = named.get(target);
  box.togglePopover(token !== undefined);
  if (!token) return;
  const isChosen = (it) => it.token === token.token && it.logprob === token.logprob;
  const listed = token.top_logprobs.some(isChosen) ? token.top_logprobs : [token, ...token.top_logprobs];
  box.replaceChildren(...listed.map((it) => {
    const line = document.createElement(isChosen(it) ? "strong" : "span");
    line.append(it.bytes ? JSON.stringify(it.token) : "a special token", " ", percent(it.logprob));
    return line;
  }));
  const { left, bottom } = target.getBoundingClientRect();
  box.style.left = `${Math.max(0, Math.min(left, document.documentElement.clientWidth - box.offsetWidth))}px`;
  box.style.top = `${Math.min(bottom + 4, innerHeight - box.offsetHeight)}px`;
}

document.addEventListener("pointerover", show);
document.addEventListener("focusin", show);
document.addEventListener("keydown", ({ key, target }) => {
  if (key === "Escape") box.togglePopover(false);
  const next = { ArrowRight: target.nextElementSibling, ArrowLeft: target.previousElementSibling }[key];
  if (!named.has(target) || !named.has(next)) return;
  [target.tabIndex, next.tabIndex] = [-1, 0];
  next.focus();
});
