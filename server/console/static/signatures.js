// Checks what the operator signed, receipts and statements, with the public keys of the API.
import { api } from "./actions.js";

const bytes = (hex) => Uint8Array.from(hex.match(/../g), (pair) => parseInt(pair, 16));
const hex = (buffer) => [...new Uint8Array(buffer)].map((byte) => byte.toString(16).padStart(2, "0")).join("");

/** Why this browser cannot check a signature here; "" if it can. */
export const hindrance = globalThis.crypto?.subtle
  ? "" : "A browser checks signatures only over https or on this machine itself; `chorale receipts verify` checks them anywhere.";

/** Whether a text has the hash, and the hash a signature of the operator's key. */
export async function isGenuine(text, { sha256, signature, keyId }) {
  const { data } = await (await api("GET", "/v1/receipts/keys")).json();
  const found = data.find(({ key_id }) => key_id === keyId);
  if (!found) return false;
  const encode = (string) => new TextEncoder().encode(string);
  if (hex(await crypto.subtle.digest("SHA-256", encode(text))) !== sha256) return false;
  const key = await crypto.subtle.importKey("raw", bytes(found.public_key), "Ed25519", false, ["verify"]);
  const signed = Uint8Array.from(atob(signature), (character) => character.charCodeAt(0));
  return crypto.subtle.verify("Ed25519", key, signed, encode(`chorale receipt 1\n${sha256}`));
}

/** What a page says of what it has checked. */
export function verdictOf(genuine) {
  return genuine
    ? "Genuine: your browser made the hash again, and the signature is of the operator's key."
    : "Not genuine: hash or signature do not fit. Keep it, and ask the operator.";
}
