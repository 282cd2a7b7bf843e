// The curl command and the Python program that ask what a body of /v1/chat/completions asks.
const WIDTH = 88;
const NOT_OPENAIS = new Set(["min_p", "min_tokens", "repetition_penalty", "speculation", "top_k"]);

/** A command for a shell.   origin: of the server, as in https://host. */
export function curl(origin, body) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "\\u0027"); // JSON has ' in strings alone
  return `curl -s ${origin}/v1/chat/completions \\
  -H "authorization: Bearer $CHORALE_API_KEY" \\
  -H 'content-type: application/json' \\
  -d '${json}'`;
}

/** A program for OpenAI's client that prints the answer, or its calls of tools. */
export function python(origin, body) {
  const known = {}, extra = {};
  for (const [name, value] of Object.entries(body)) (NOT_OPENAIS.has(name) ? extra : known)[name] = value;
  if (Object.keys(extra).length) known.extra_body = extra;
  const fields = Object.entries(known).map(([name, value]) => `    ${name}=${literal(value, "    ")},\n`);
  const printed = body.tools ? "message.tool_calls or message.content" : "message.content";
  return `import os

from openai import OpenAI

client = OpenAI(base_url=${literal(`${origin}/v1`)}, api_key=os.environ["CHORALE_API_KEY"])
answer = client.chat.completions.create(
${fields.join("")})
message = answer.choices[0].message
print(${printed})`;
}

/** A JSON value as Python writes it; in several lines if one is not enough. */
function literal(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const deeper = `${indent}    `;
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value)
    ? value.map((it) => literal(it, deeper))
    : Object.entries(value).map(([name, it]) => `${JSON.stringify(name)}: ${literal(it, deeper)}`);
  const line = open + parts.join(", ") + close;
  if (indent.length + line.length <= WIDTH && !line.includes("\n")) return line;
  return `${open}\n${parts.map((part) => `${deeper}${part},\n`).join("")}${indent}${close}`;
}
