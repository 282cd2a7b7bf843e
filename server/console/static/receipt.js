// Checks a receipt where it is shown: its hash is made again, and the signature is checked with the public key.
import { api } from "./actions.js";

const place = document.getElementById("receipt");
const verdict = place.querySelector("[data-verdict]");
const bytes = (hex) => Uint8Array.from(hex.match(/../g), (pair) => parseInt(pair, 16));
const hex = (buffer) => [...new Uint8Array(buffer)].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/** The JSON that was hashed: the fields with a value in the order of their names, and the form's name. */
function canonical({ sha256, signature, ...receipt }) {
  const fields = { schema: "chorale.receipt/1", ...receipt };
  const names = Object.keys(fields).filter((name) => fields[name] !== null).sort();
  return JSON.stringify(Object.fromEntries(names.map((name) => [name, fields[name]])));
}

async function isGenuine(receipt) {
  const { data } = await (await api("GET", "/v1/receipts/keys")).json();
  const found = data.find(({ key_id }) => key_id === receipt.signing_key);
  if (!found) return false;
  const text = new TextEncoder().encode(canonical(receipt));
  if (hex(await crypto.subtle.digest("SHA-256", text)) !== receipt.sha256) return false;
  const key = await crypto.subtle.importKey("raw", bytes(found.public_key), "Ed25519", false, ["verify"]);
  const signature = Uint8Array.from(atob(receipt.signature), (character) => character.charCodeAt(0));
  return crypto.subtle.verify("Ed25519", key, signature, new TextEncoder().encode(`chorale receipt 1\n${receipt.sha256}`));
}

async function check() {
  const { receipt, corrections } = await (await api("GET", `/v1/receipts/${encodeURIComponent(place.dataset.request)}`)).json();
  for (const [name, value] of Object.entries(receipt)) {
    const term = Object.assign(document.createElement("dt"), { textContent: name });
    const field = Object.assign(document.createElement("dd"), { textContent: value ?? "–" });
    place.querySelector("[data-fields]").append(term, field);
  }
  if (!globalThis.crypto?.subtle) {
    verdict.textContent = "A browser checks signatures only over https or on this machine itself; `chorale receipts verify` checks them anywhere.";
    return;
  }
  const genuine = (await Promise.all([receipt, ...corrections].map(isGenuine))).every(Boolean);
  const corrected = corrections.length ? ` It was taken back by receipt ${corrections.map((it) => it.receipt_seq).join(", ")}.` : "";
  verdict.textContent = (genuine
    ? "Genuine: your browser made the hash again, and the signature is of the operator's key."
    : "Not genuine: hash or signature do not fit. Keep it, and ask the operator.") + corrected;
  verdict.dataset.genuine = genuine;
}

check().catch((error) => { verdict.textContent = `The receipt could not be checked: ${error.message}`; });
