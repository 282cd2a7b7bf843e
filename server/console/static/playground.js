// The playground: one question to several models, each with a conversation of its own in its column.
import { chunksOf } from "/stream.js";
import { api, valueOf } from "./actions.js";
import { Turn, fromTemplate } from "./turn.js";

const MAX_COLUMNS = 6, MAX_OFFERED = 50, NUM_LIKELY = 5;
const choose = document.getElementById("choose"), form = document.getElementById("ask");
const fields = form.elements, place = document.getElementById("columns");
const kept = [...form.querySelectorAll("[data-kept]")];
const written = (field) => (field.type === "checkbox" ? String(field.checked) : field.value);
const defaults = new Map(kept.map((field) => [field, written(field)]));
let columns = [];

// ---- a column: a model and its conversation ----
class Column {
  #shown = fromTemplate("column");
  #messages = [];
  #last = null;
  #controller = new AbortController();

  constructor(model) {
    this.model = model;
    this.#shown.model.textContent = this.root.ariaLabel = model;
    this.#shown.remove.addEventListener("click", () => remove(this));
  }

  get root() { return this.#shown.root; }
  get results() { return this.#last?.results ?? []; }

  stop() { this.#controller.abort(); }

  reset() {
    this.stop();
    [this.#messages, this.#last] = [[], null];
    for (const turn of this.root.querySelectorAll(".turn")) turn.remove();
  }

  /** Ask, and show the answer as it comes. An answer that fails is no part of the conversation. */
  async ask(system, message, asked) {
    const said = [...this.results, ...(message ? [{ role: "user", content: message }] : [])];
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...this.#messages, ...said];
    const body = { model: this.model, messages, ...asked };
    const turn = new Turn(message || "The results of its calls", body);
    const { signal } = this.#controller = new AbortController();
    this.root.append(turn.root);
    try {
      const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
      const response = await api("POST", "/v1/chat/completions", { body: streamed, signal });
      for await (const chunk of chunksOf(response)) turn.take(chunk);
      turn.end();
      this.#messages.push(...said, turn.message);
      this.#last = turn;
    } catch (error) {
      turn.end(signal.aborted ? "Stopped. It is left out of the conversation." : error.message);
    }
  }
}

function add(model) {
  if (columns.length === MAX_COLUMNS) throw new Error(`At most ${MAX_COLUMNS} models are asked at a time; remove one first.`);
  const column = new Column(model);
  columns.push(column);
  place.append(column.root);
}

function remove(column) {
  column.stop();
  column.root.remove();
  columns = columns.filter((it) => it !== column);
  remember();
}

// ---- asking ----
/** Complain of the first field that cannot be read. Returns whether all can. */
function canBeRead() {
  for (const field of fields) {
    if (field.dataset.type === "json") field.setCustomValidity(faultOf(field.value));
    if (field.checkValidity()) continue;
    if (field.closest("details")) field.closest("details").open = true;
    form.querySelector("output").textContent = `${field.name}: ${field.validationMessage}`;
    field.focus();
    return false;
  }
  return true;
}

function faultOf(json) {
  try {
    if (json) JSON.parse(json);
    return "";
  } catch (error) {
    return `This is not JSON: ${error.message}`;
  }
}

/** The parameters of the form, as the API takes them. */
function parameters() {
  const read = [...form.querySelectorAll("[data-parameter]")].map((field) => [field.name, valueOf(field)]);
  const asked = Object.fromEntries(read.filter(([, value]) => value !== undefined && value !== false));
  const schema = valueOf(fields.schema), choice = fields.tool_choice.value;
  if (asked.logprobs) asked.top_logprobs = NUM_LIKELY;
  if (schema) asked.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (choice) asked.tool_choice = ["auto", "none", "required"].includes(choice) ? choice : { type: "function", function: { name: choice } };
  return asked;
}

async function ask() {
  const complaint = form.querySelector("output"), message = fields.message.value.trim();
  complaint.textContent = "";
  if (form.hasAttribute("data-asking") || !canBeRead()) return;
  const asked = columns.filter((column) => message || column.results.length);
  if (!asked.length) {
    complaint.textContent = columns.length ? "Write a message first." : "Add a model first.";
    return;
  }
  form.toggleAttribute("data-asking", true);
  fields.message.value = "";
  const given = parameters();
  await Promise.all(asked.map((column) => column.ask(fields.system.value.trim(), message, given)));
  form.toggleAttribute("data-asking", false);
}

// ---- the page's address, which has models and parameters, and never what is said ----
function remember() {
  const changed = kept.filter((field) => written(field) !== defaults.get(field));
  const query = new URLSearchParams([
    ...columns.map(({ model }) => ["model", model]), ...changed.map((field) => [field.name, written(field)]),
  ]);
  history.replaceState(null, "", `?${query}`);
}

function recall() {
  const query = new URLSearchParams(location.search);
  for (const field of kept) {
    const value = query.get(field.name);
    if (value === null) continue;
    if (field.type === "checkbox") field.checked = value === "true";
    else field.value = value;
  }
  query.getAll("model").slice(0, MAX_COLUMNS).forEach(add);
}

// ---- models ----
async function listModels() {
  const { data } = await (await api("GET", "/v1/models")).json();
  const offer = () => {
    const found = data.filter(({ id }) => id.includes(choose.elements.model.value)).slice(0, MAX_OFFERED);
    document.getElementById("models").replaceChildren(...found.map(({ id }) => new Option(id, id)));
  };
  choose.addEventListener("input", offer);
  offer();
  // Another tenant's adapter is asked only if the user says so: the user's tenant pays for the answer.
  const isOwn = ({ parent, owned_by }) => !parent || owned_by === choose.dataset.tenant;
  if (!columns.length) data.filter(isOwn).slice(0, 2).forEach(({ id }) => add(id));
}

function complain(error) {
  choose.querySelector("output").textContent = error.message;
}

choose.addEventListener("submit", (event) => {
  event.preventDefault();
  complain({ message: "" });
  try {
    add(choose.elements.model.value.trim());
    choose.reset();
    remember();
  } catch (error) {
    complain(error);
  }
});
form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
form.addEventListener("change", remember);
fields.message.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  form.requestSubmit();
});
document.getElementById("stop").addEventListener("click", () => columns.forEach((column) => column.stop()));
document.getElementById("reset").addEventListener("click", () => columns.forEach((column) => column.reset()));

recall();
listModels().catch(complain);
