// Forms that change something: each is one call of the API, in the session of the page.
//
// <form data-method="PUT" data-path="/v1/adapters/x/aliases/{alias}" data-confirm="..." data-then="/console/adapters">
// A field whose name is in the path goes there, all others into the JSON body, where `a.b` nests.
// data-type: number, json, lines, or time (UTC, sent as Unix seconds).   An empty field is left out, or null with
// data-empty="null".   Boxes that have a value and share a name are a list.   A PATCH has what was changed alone.
// data-show: the answer's field that is shown once, as a new key is.   data-once: the Idempotency-Key.
// data-then: where to go afterwards, with `{field}` of the answer; without it the page's main part is loaded again.
export const csrf = document.querySelector("meta[name=csrf]")?.content ?? "";

/** Call the API in the session of the page. Returns its answer; throws an Error with what it said. */
export async function api(method, path, { body, headers, signal } = {}) {
  const isJson = body !== undefined && !(body instanceof Blob);
  const response = await fetch(path, {
    method, signal, cache: "no-store",
    headers: { "x-chorale-csrf": csrf, ...(isJson && { "content-type": "application/json" }), ...headers },
    body: isJson ? JSON.stringify(body) : body,
  });
  return checked(response);
}

/** The response, if it is a success. Throws an Error with what it said. */
export async function checked(response) {
  if (response.ok) return response;
  if (response.status === 401) location.reload(); // the session is over: the page leads to signing in
  const answer = await response.json().catch(() => null);
  throw Object.assign(new Error(answer?.error?.message ?? `The server answered with status ${response.status}.`), {
    status: response.status, param: answer?.error?.param, code: answer?.error?.code, headers: response.headers,
  });
}

/** Load the page's main part again. */
export function reload() {
  return htmx.ajax("GET", location.href, { target: "#main", select: "#main", swap: "outerHTML" });
}

/** What a field stands for in the body of a call; undefined if it is left out. */
export function valueOf(field) {
  if (field.type === "checkbox") return field.checked;
  if (field.value === "") return field.dataset.empty === "null" ? null : undefined;
  switch (field.dataset.type) {
    case "number": return Number(field.value);
    case "json": return JSON.parse(field.value);
    case "time": return Math.floor(Date.parse(`${field.value}Z`) / 1000);
    case "lines": return field.value.split("\n").map((line) => line.trim()).filter(Boolean);
    default: return field.value;
  }
}

const isOfList = (field) => field.type === "checkbox" && field.hasAttribute("value");

/** Whether a field, or a box of its list, is not as the page came with it. */
function isChanged(field) {
  if (field.type === "hidden") return true;
  if (field.options) return [...field.options].some((it) => it.selected !== it.defaultSelected);
  if (field.type !== "checkbox" && field.type !== "radio") return field.value !== field.defaultValue;
  return [...field.form.elements].some((it) => it.name === field.name && it.checked !== it.defaultChecked);
}

/** The path and the body that a form stands for. */
function call(form) {
  const isPatch = form.dataset.method === "PATCH";
  let path = form.dataset.path, body = isPatch ? {} : undefined;
  for (const field of form.elements) {
    if (!field.name || field.disabled || (field.type === "radio" && !field.checked)) continue;
    if (isPatch && !path.includes(`{${field.name}}`) && !isChanged(field)) continue;
    const value = field.multiple ? [...field.selectedOptions].map((it) => it.value) : valueOf(field);
    if (path.includes(`{${field.name}}`)) {
      path = path.replace(`{${field.name}}`, encodeURIComponent(value ?? ""));
    } else if (value !== undefined) {
      body ??= {};
      const names = field.name.split("."), last = names.pop();
      const inner = names.reduce((inner, name) => (inner[name] ??= {}), body);
      if (!isOfList(field)) inner[last] = value;
      else inner[last] = [...(inner[last] ?? []), ...(field.checked ? [field.value] : [])];
    }
  }
  return [path, body];
}

async function send(form) {
  const output = form.querySelector("output") ?? form.appendChild(Object.assign(document.createElement("output"), { role: "alert" }));
  output.textContent = "";
  if (form.dataset.confirm && !confirm(form.dataset.confirm)) return;
  const button = form.querySelector("button:not([type=button])");
  button.disabled = true;
  try {
    const [path, body] = call(form);
    const headers = form.dataset.once && { "idempotency-key": form.dataset.once };
    const response = await api(form.dataset.method, path, { body, headers });
    const answer = response.status === 204 ? null : await response.json();
    if (form.dataset.show) return show(form, answer);
    if (form.dataset.then) return location.assign(form.dataset.then.replace(/\{(\w+)\}/, (_, name) => answer[name]));
    await reload();
  } catch (error) {
    output.textContent = error.message;
    const field = error.param && form.elements[error.param];
    if (field?.focus) field.focus();
  } finally {
    button.disabled = false;
  }
}

/** Show a part of the answer that can be read only now, above the page as it is after the call. */
function show(form, answer) {
  const box = Object.assign(document.createElement("div"), { className: "secret", role: "alert" });
  box.innerHTML = 'It is shown this once: <code class="mono"></code> <button data-copy>Copy</button> <button>I have kept it</button>';
  const [secret, copy, done] = box.children;
  secret.textContent = answer[form.dataset.show];
  // Each load of the main part takes the box away, also one that was under way before.
  const keep = () => {
    if (box.isConnected) return;
    document.getElementById("main").prepend(box);
    copy.focus();
  };
  document.addEventListener("htmx:afterSettle", keep);
  done.addEventListener("click", () => {
    document.removeEventListener("htmx:afterSettle", keep);
    box.remove();
  });
  form.replaceWith(box);
  return reload();
}

document.addEventListener("click", async ({ target }) => {
  if (!target.hasAttribute("data-copy")) return;
  const code = target.closest("figure, .secret").querySelector("pre, code");
  getSelection().selectAllChildren(code); // without https a page may not write to the clipboard, but its user may
  await navigator.clipboard?.writeText(code.textContent);
  target.textContent = target.ariaLabel = navigator.clipboard ? "Copied" : "Selected";
});

document.addEventListener("submit", (event) => {
  if (!event.target.dataset.path) return;
  event.preventDefault();
  send(event.target);
});
document.addEventListener("htmx:configRequest", (event) => { event.detail.headers["x-chorale-csrf"] = csrf; });
// The figures of an earlier filter must not stay beside one that the server refuses.
document.addEventListener("htmx:responseError", ({ detail: { elt, target, xhr } }) => {
  if (!elt.matches("form.filters")) return;
  const page = new DOMParser().parseFromString(xhr.responseText, "text/html");
  target.replaceChildren(page.querySelector(".fault") ?? `The server answered with status ${xhr.status}.`);
});
