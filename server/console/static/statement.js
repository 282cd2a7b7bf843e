// Checks a statement where it is shown: the text that was signed is on the page.
import { hindrance, isGenuine, verdictOf } from "./signatures.js";

const place = document.getElementById("statement");
const verdict = place.querySelector("[data-verdict]");

async function check() {
  if (hindrance) return hindrance;
  const { sha256, signature, key: keyId } = place.dataset;
  const genuine = await isGenuine(place.querySelector("[data-document]").textContent, { sha256, signature, keyId });
  verdict.dataset.genuine = genuine;
  return verdictOf(genuine);
}

check().catch((error) => `The statement could not be checked: ${error.message}`)
  .then((said) => { verdict.textContent = said; });
