// OpenAI's client for Node.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

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

const Home = z.object({ place: z.enum(["den", "web"]), depth: z.int().min(0).max(9) });
const Animal = z.object({ homes: z.array(Home).min(1).max(2), tame: z.boolean().nullable() });
const response_format = zodResponseFormat(Animal, "animal");
const shape = { ...ask, messages: [QUESTION], response_format };
const fox = (await client.chat.completions.parse(shape)).choices[0].message.parsed;
Animal.parse(fox);
const streamed = await client.chat.completions.stream(shape).finalChatCompletion();
assert.deepEqual(streamed.choices[0].message.parsed, fox);
console.log("works: `parse` and `stream` with `zodResponseFormat`");

const look_up = ({ thing, fact }) => ({ fox: { eats: "berries" } })[thing][fact];
const text = { type: "string" };
const parameters = {
  type: "object", properties: { thing: text, fact: text }, required: ["thing", "fact"],
};
const tool = {
  type: "function",
  function: {
    name: "look_up", description: "Look a fact up.", parameters, parse: JSON.parse,
    function: look_up,
  },
};
const agent = { model: "agent", temperature: 0, messages: [QUESTION], tools: [tool] };
const ran = client.chat.completions.runTools(agent);
assert.equal(await ran.finalContent(), "A fox eats berries.");
console.log("works: `runTools`");

const running = client.chat.completions.runTools({ ...agent, stream: true });
const results = [];
running.on("functionToolCallResult", (result) => results.push(result));
assert.equal(await running.finalContent(), "A fox eats berries.");
assert.deepEqual(results, ["berries"]);
console.log("works: streamed `runTools`");

await assert.rejects(
  client.completions.create({ ...ask, prompt: "A fox", suffix: "end" }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "suffix",
);
console.log("works: errors of its own classes");
