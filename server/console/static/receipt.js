// Checks a receipt where it is shown: its hash is made again, and the signature is checked with the public key.
import { api } from "./actions.js";
import { hindrance, isGenuine, verdictOf } from "./signatures.js";

const place = document.getElementById("receipt");
const verdict = place.querySelector("[data-verdict]");

/** The JSON that was hashed: the fields with a value in the order of their names, and the form's name. */
function canonical({ sha256, signature, ...receipt }) {
  const fields = { schema: "chorale.receipt/1", ...receipt };
  const names = Object.keys(fields).filter((name) => fields[name] !== null).sort();
  return JSON.stringify(Object.fromEntries(names.map((name) => [name, fields[name]])));
}

function isGenuineReceipt(receipt) {
  const { sha256, signature, signing_key: keyId } = receipt;
  return isGenuine(canonical(receipt), { sha256, signature, keyId });
}

async function check() {
  const { receipt, corrections } = await (await api("GET", `/v1/receipts/${encodeURIComponent(place.dataset.request)}`)).json();
  for (const [name, value] of Object.entries(receipt)) {
    const term = Object.assign(document.createElement("dt"), { textContent: name });
    const field = Object.assign(document.createElement("dd"), { textContent: value ?? "–" });
    place.querySelector("[data-fields]").append(term, field);
  }
  if (hindrance) {
    verdict.textContent = hindrance;
    return;
  }
  const genuine = (await Promise.all([receipt, ...corrections].map(isGenuineReceipt))).every(Boolean);
  const corrected = corrections.length ? ` It was taken back by receipt ${corrections.map((it) => it.receipt_seq).join(", ")}.` : "";
  verdict.textContent = verdictOf(genuine) + corrected;
  verdict.dataset.genuine = genuine;
}

check().catch((error) => { verdict.textContent = `The receipt could not be checked: ${error.message}`; });
