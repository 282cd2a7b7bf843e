// OpenAI's client for Node.
import assert from "node:assert/strict";
import OpenAI from "openai";

const { CHORALE_URL: URL, CHORALE_API_KEY: KEY } = process.env;
const QUESTION = { role: "user", content: "What does a fox eat?" };
const ANSWER = '{"animal": "fox", "eats": "mice"}';

const client = new OpenAI({ baseURL: URL + "/v1", apiKey: KEY, maxRetries: 0 });
const ask = { model: "json", temperature: 0 };

const models = await client.models.list();
assert(models.data.some((model) => model.id === "json"));
console.log("works: models");

const messages = [QUESTION];
const answer = await client.chat.completions.create({ ...ask, messages });
assert.equal(answer.choices[0].message.content, ANSWER);
console.log("works: chat");

messages.push(answer.choices[0].message, { role: "user", content: "And an owl?" });
const next = await client.chat.completions.create({ ...ask, messages });
assert.match(next.choices[0].message.content, /owl/);
console.log("works: answers sent back");

const stream = client.chat.completions.stream({
  ...ask, messages: [QUESTION], stream_options: { include_usage: true },
});
assert.equal(await stream.finalContent(), ANSWER);
assert.equal((await stream.totalUsage()).total_tokens, answer.usage.total_tokens);
console.log("works: streams with usage");

const prompt = ["A fox eats", "The capital of Norway is"];
const both = await client.completions.create({ ...ask, prompt, max_tokens: 4 });
assert.deepEqual(both.choices.map((choice) => choice.index), [0, 1]);
console.log("works: completions of several prompts");

await assert.rejects(
  client.completions.create({ ...ask, prompt: "A fox", suffix: "end" }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "suffix",
);
console.log("works: errors of its own classes");
