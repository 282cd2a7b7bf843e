// Streamed answers and their figures, for the page at `/` and for the console.
export const dollars = (nanousd) => `$${(nanousd / 1e9).toFixed(9)}`;
export const milliseconds = (ms) => `${Math.round(ms)} ms`;

/** The chunks of a stream. A failure on the way arrives as an event, and is thrown. */
export async function* chunksOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let pending = ""; ;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    const events = (pending + value).split("\n\n");
    pending = events.pop();
    for (const event of events) {
      if (event === "data: [DONE]") return;
      const chunk = JSON.parse(event.slice("data: ".length));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}

/** Tokens, speed and cost of an answer as texts.   spanMs: from its first token to its last. */
export function figures({ prompt_tokens, completion_tokens, x_chorale }, spanMs) {
  const speed = spanMs > 0 ? `${Math.round((completion_tokens - 1) / (spanMs / 1000))} tokens/s` : "–";
  return [`${prompt_tokens} in, ${completion_tokens} out`, speed, dollars(x_chorale.cost_nanousd)];
}
