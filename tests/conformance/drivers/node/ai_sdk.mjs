// The AI SDK: its provider for compatible servers (chat), or OpenAI's own (responses).
// Tasks come and results go as in driver.py.

import { createInterface } from "node:readline";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name, variant] = process.argv.slice(2);
const server = { name: "slipstream", baseURL: `${url}/v1`, apiKey: "none" };
const PROVIDERS = {
  chat: () => createOpenAICompatible({ ...server, supportsStructuredOutputs: true }),
  responses: () => createOpenAI(server),
};
const model = PROVIDERS[variant]()(name);

const settings = ({ prompt, max_tokens }) => ({
  model, prompt, maxOutputTokens: max_tokens, temperature: 0, maxRetries: 0,
});

const Book = z.object({ title: z.string(), author: z.string(), year: z.number().int() });

const TASKS = {
  text: async (task) => (await generateText(settings(task))).text,

  stream: async (task) => {
    let failure;
    const onError = ({ error }) => { failure = error; };
    const pieces = [];
    for await (const piece of streamText({ ...settings(task), onError }).textStream) {
      pieces.push(piece);
    }
    if (failure) throw failure;
    return pieces;
  },

  structured: async (task) =>
    (await generateText({ ...settings(task), output: Output.object({ schema: Book }) })).output,

  tool_call: async (task) => {
    const get_weather = tool({
      description: "Get the current weather of a city.",
      inputSchema: z.object({ city: z.string().describe("name of the city") }),
      execute: async () => task.weather,
    });
    const options = { ...settings(task), tools: { get_weather }, stopWhen: stepCountIs(3) };
    const answer = await generateText(options);
    const calls = answer.steps.flatMap((step) => step.toolCalls);
    return [calls.map((call) => ({ name: call.toolName, arguments: call.input })), answer.text];
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { task, ...rest } = JSON.parse(line);
  let reply;
  try {
    reply = { result: await TASKS[task](rest) };
  } catch (error) {
    reply = { error: `${error.stack}\n${error.responseBody ?? ""}` };
  }
  console.log(JSON.stringify(reply));
}
