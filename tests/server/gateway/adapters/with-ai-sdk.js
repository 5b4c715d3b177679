// Holds conversations through the AI SDK: `node with-ai-sdk.js URL LOGIT_BIAS`.

import assert from 'node:assert/strict';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const [url, bias] = process.argv.slice(2);

// Of the routes only chats have an option for it.
const withBias = (target, init) => {
  const body = { ...JSON.parse(init.body), logit_bias: JSON.parse(bias) };
  return fetch(target, { ...init, body: JSON.stringify(body) });
};
const settings = { baseURL: url, apiKey: 'none', fetch: withBias };
const openai = createOpenAI(settings);
const compatible = createOpenAICompatible({ ...settings, name: 'trident', includeUsage: true });

const weather = tool({
  description: 'Tell the weather.',
  inputSchema: z.object({ city: z.enum(['Rome', 'Zürich']) }),
  execute: async ({ city }) => ({ city }),
});

function check(steps) {
  assert.equal(steps.length, 2);
  const [called, answered] = steps;
  assert.equal(called.finishReason, 'tool-calls');
  assert.deepEqual(called.toolCalls.map((call) => call.toolName), ['get_weather']);
  assert.deepEqual(called.toolResults.map((result) => result.output), [called.toolCalls[0].input]);
  assert.ok(answered.text);
  for (const step of steps) {
    assert.deepEqual(step.warnings, []);
    assert.ok(step.usage.outputTokens > 1);
  }
}

const seen = (steps) =>
  steps.map((step) => [step.text, step.toolCalls.map((call) => call.input), step.usage.totalTokens]);

for (const model of [compatible('ensemble'), openai.chat('ensemble'), openai('ensemble')]) {
  for (const toolChoice of ['required', { type: 'tool', toolName: 'get_weather' }]) {
    const asked = {
      model,
      tools: { get_weather: weather },
      prompt: 'Rain in Rome?',
      maxOutputTokens: 120,
      temperature: 0,
      maxRetries: 0,
      stopWhen: stepCountIs(2),
      prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? toolChoice : 'auto' }),
    };
    const { steps } = await generateText(asked);
    check(steps);
    const stream = streamText({ ...asked, onError: ({ error }) => assert.fail(error) });
    await stream.consumeStream();
    const streamed = await stream.steps;
    check(streamed);
    assert.deepEqual(seen(streamed), seen(steps));
  }
}
