// The form that uploads an adapter's two files, by the API's protocol: declare, send in parts, complete, follow.
//
// An upload that was left is resumed where the server stands, if the same files are chosen under the same name.
import { api, checked, csrf } from "./actions.js";
import { Sha256 } from "./sha256.js";

const FILES = ["adapter_config.json", "adapter_model.safetensors"];
const PIECE_BYTES = 1 << 20;
const MAX_FAILURES = 5, MAX_PAUSE_MS = 10_000, POLL_MS = 500;
const STAGES = {
  reading: "This page makes the files' sha256.", sending: "The files are on their way.",
  checking: "The server checks the files.", proving: "An engine proves the adapter: served, and merged into the base model.",
};

const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const megabytes = (bytes) => `${(bytes / 1e6).toFixed(bytes < 1e7 ? 2 : 0)} MB`;

/** Pause after a failure that may pass; throw one that will not, or that came too often. */
async function pause(error, failures) {
  const { status, headers } = error;
  if (!status && failures > MAX_FAILURES) throw new Error("The server cannot be reached. Upload again: it goes on where it stopped.");
  const mayPass = !status || status >= 500 || status === 408 || status === 429;
  if (!mayPass || failures > MAX_FAILURES || headers?.get("x-should-retry") === "false") throw error;
  const asked = Number(headers?.get("retry-after")) * 1000;
  await wait(Math.min(asked || 500 * 2 ** failures, MAX_PAUSE_MS));
}

async function insist(call) {
  for (let failures = 1; ; failures++) {
    try {
      return await (await call()).json();
    } catch (error) {
      await pause(error, failures);
    }
  }
}

/** Show how many bytes of all files are done.   files: by name. */
function barOf(form, files) {
  const done = {}, total = FILES.reduce((sum, name) => sum + files[name].size, 0);
  const bar = form.querySelector("progress"), figures = form.querySelector("[data-bytes]");
  bar.max = total;
  return (name, bytes) => {
    done[name] = bytes;
    bar.value = Object.values(done).reduce((sum, it) => sum + it, 0);
    figures.textContent = `${megabytes(bar.value)} of ${megabytes(total)}`;
  };
}

function enter(form, stage, said = STAGES[stage]) {
  const status = form.querySelector("[role=status]");
  if (status.textContent !== said) status.textContent = said; // it is read out at each change
  let isPast = true;
  for (const item of form.querySelectorAll("[data-stage]")) {
    const isIt = item.dataset.stage === stage;
    if (isIt) isPast = false;
    item.classList.toggle("done", isPast || (isIt && stage === "ready"));
    item.toggleAttribute("aria-current", isIt);
    if (isIt) item.setAttribute("aria-current", "step");
  }
}

async function sha256(file, show) {
  const hash = new Sha256();
  for (let at = 0; at < file.size; at += PIECE_BYTES) {
    hash.update(new Uint8Array(await file.slice(at, at + PIECE_BYTES).arrayBuffer()));
    show(file.name, Math.min(at + PIECE_BYTES, file.size));
  }
  return hash.hex();
}

/** The upload that these files began earlier under this name, if it can go on; else a new one. */
async function open(key, path, body) {
  const id = localStorage.getItem(key);
  if (id) {
    const found = await api("GET", `/v1/uploads/${id}`).then((it) => it.json(), (error) => {
      if (error.status !== 404) throw error;
    });
    if (["open", "proving", "complete"].includes(found?.state)) return found;
  }
  const made = await (await api("POST", path, { body })).json();
  localStorage.setItem(key, made.id);
  return made;
}

/** Send one part. `fetch` does not say how much it has sent. */
function put(path, part, range, onSent) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("PUT", path);
    request.setRequestHeader("x-chorale-csrf", csrf);
    request.setRequestHeader("content-range", range);
    request.upload.addEventListener("progress", (event) => onSent(event.loaded));
    request.addEventListener("error", () => reject(new Error("The connection was lost.")));
    request.addEventListener("load", () => {
      const headers = ["retry-after", "x-should-retry"].map((name) => [name, request.getResponseHeader(name) ?? ""]);
      checked(new Response(request.responseText, { status: request.status, headers })).then((it) => it.json()).then(resolve, reject);
    });
    request.send(part);
  });
}

async function send(upload, file, partBytes, show) {
  const path = `/v1/uploads/${upload.id}`;
  let at = upload.files[file.name].received_bytes, failures = 0;
  for (;;) {
    try {
      at ??= (await (await api("GET", path)).json()).files[file.name].received_bytes;
      show(file.name, at);
      if (at === file.size) return;
      const start = at, end = Math.min(at + partBytes, file.size);
      const range = `bytes ${start}-${end - 1}/${file.size}`;
      const answer = await put(`${path}/files/${file.name}`, file.slice(start, end), range, (sent) => show(file.name, start + sent));
      at = answer.received_bytes;
      failures = 0;
    } catch (error) {
      failures += 1;
      if (error.code !== "upload_offset_mismatch" || failures > MAX_FAILURES) await pause(error, failures);
      at = undefined;
    }
  }
}

/** Complete an upload, show how it goes, and return it when it has ended. */
async function follow(form, id) {
  const path = `/v1/uploads/${id}`;
  let refusal = null;
  insist(() => api("POST", `${path}/complete`)).catch((error) => { refusal = error; });
  for (;;) {
    const said = refusal;
    const upload = await insist(() => api("GET", path));
    if (upload.state !== "open" && upload.state !== "proving") return upload;
    if (said && upload.state === "open") throw said;
    enter(form, upload.state === "open" ? "checking" : "proving");
    await wait(POLL_MS);
  }
}

async function run(form) {
  const { name, alias, base_model } = Object.fromEntries(new FormData(form));
  const files = Object.fromEntries([...form.querySelector("[type=file]").files].map((file) => [file.name, file]));
  const missing = FILES.filter((it) => !files[it]?.size);
  if (missing.length) throw new Error(`Choose both files that PEFT writes: ${missing.join(" and ")} is missing or empty.`);
  form.querySelector("[data-course]").hidden = false;
  enter(form, "reading");
  const read = barOf(form, files), declared = {};
  for (const it of FILES) declared[it] = { size_bytes: files[it].size, sha256: await sha256(files[it], read) };
  const body = { files: declared, ...(alias && { alias }), ...(base_model && { base_model }) };
  const key = `upload ${JSON.stringify([name, body])}`;
  let upload = await open(key, `/v1/adapters/${encodeURIComponent(name)}/uploads`, body);
  if (upload.state === "open") {
    enter(form, "sending");
    const show = barOf(form, files);
    for (const it of FILES) await send(upload, files[it], Number(form.dataset.partBytes), show);
  }
  if (upload.state !== "complete") upload = await follow(form, upload.id);
  localStorage.removeItem(key);
  if (upload.state !== "complete") throw new Error(upload.error ? `${upload.error.message} (${upload.error.code})` : `The upload is ${upload.state}; upload it again.`);
  const { version } = upload.version;
  enter(form, "ready", `${name}@${version} is ready. `);
  const link = Object.assign(document.createElement("a"), { href: `/console/adapters/${name}?version=${version}`, textContent: "See its passport" });
  form.querySelector("[role=status]").append(link);
  link.focus();
  if (document.getElementById("found")) htmx.ajax("GET", location.href, { target: "#found", select: "#found", swap: "outerHTML" });
}

document.addEventListener("submit", async (event) => {
  const form = event.target;
  if (form.id !== "upload") return;
  event.preventDefault();
  const output = form.querySelector("output"), button = form.querySelector("button");
  output.textContent = "";
  button.disabled = true;
  try {
    await run(form);
  } catch (error) {
    output.textContent = error.message;
  } finally {
    button.disabled = false;
  }
});

// ---- dropping ----

const formUnder = (event) => event.target.closest?.("#upload");

/** The file of a dropped folder; null if it has none of this name. */
function fileIn(folder, name) {
  return new Promise((resolve) => folder.getFile(name, {}, (entry) => entry.file(resolve, () => resolve(null)), () => resolve(null)));
}

async function drop(form, dropped) {
  // Entries can be read only now: after the first wait the browser has taken them back.
  const folders = [...dropped.items].map((item) => item.webkitGetAsEntry?.()).filter((entry) => entry?.isDirectory);
  const files = new DataTransfer();
  for (const file of dropped.files) if (FILES.includes(file.name)) files.items.add(file);
  for (const folder of folders) {
    for (const file of await Promise.all(FILES.map((name) => fileIn(folder, name)))) if (file) files.items.add(file);
  }
  form.querySelector("[type=file]").files = files.files;
}

for (const type of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(type, (event) => {
    const form = formUnder(event);
    if (!form) return;
    event.preventDefault();
    form.classList.toggle("over", type === "dragover");
    if (type === "drop") drop(form, event.dataTransfer);
  });
}
