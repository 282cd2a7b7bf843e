// Vercel's AI SDK, with its provider for servers that speak OpenAI's API.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const { CHORALE_URL: URL, CHORALE_API_KEY: KEY } = process.env;
const ANSWER = '{"animal": "fox", "eats": "mice"}';

const chorale = createOpenAICompatible({
  name: "chorale", baseURL: URL + "/v1", apiKey: KEY, includeUsage: true,
  supportsStructuredOutputs: true,
});
const ask = { model: chorale("json"), temperature: 0, maxRetries: 0 };
const messages = [{ role: "user", content: "What does a fox eat?" }];

const answer = await generateText({ ...ask, messages });
assert.equal(answer.text, ANSWER);
console.log("works: `generateText`");

messages.push(...answer.response.messages, { role: "user", content: "And an owl?" });
assert.match((await generateText({ ...ask, messages })).text, /owl/);
console.log("works: answers sent back");

const stream = streamText({ ...ask, messages: messages.slice(0, 1) });
let text = "";
for await (const piece of stream.textStream) text += piece;
assert.equal(text, ANSWER);
assert.deepEqual((await stream.usage).outputTokens, answer.usage.outputTokens);
console.log("works: `streamText` with usage");

const model = chorale.completionModel("json");
const completion = await generateText({ ...ask, model, prompt: "A fox eats", maxOutputTokens: 4 });
assert.equal(completion.usage.outputTokens, 4);
console.log("works: completions");

const Home = z.object({ place: z.enum(["den", "web"]), depth: z.int().min(0).max(9) });
const Animal = z.object({ homes: z.array(Home).min(1).max(2), tame: z.boolean().nullable() });
const shape = { ...ask, output: Output.object({ schema: Animal }), prompt: "What does a fox eat?" };
const fox = (await generateText(shape)).output;
Animal.parse(fox);
assert.deepEqual(await streamText(shape).output, fox);
console.log("works: `Output.object` of a Zod schema, also streamed");

const look_up = tool({
  description: "Look a fact up.",
  inputSchema: z.object({ thing: z.string(), fact: z.string() }),
  execute: async ({ thing, fact }) => ({ fox: { eats: "berries" } })[thing][fact],
});
const agent = {
  ...ask, model: chorale("agent"), tools: { look_up }, stopWhen: stepCountIs(3),
  prompt: "What does a fox eat?",
};
assert.equal((await generateText(agent)).text, "A fox eats berries.");
const steps = await streamText(agent).steps;
assert.deepEqual(steps.map((step) => step.finishReason), ["tool-calls", "stop"]);
assert.deepEqual(steps[0].toolCalls[0].input, { thing: "fox", fact: "eats" });
console.log("works: `generateText` and `streamText` with tools");
