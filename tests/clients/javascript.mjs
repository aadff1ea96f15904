// Tool loops of JavaScript libraries. Prints a line of JSON for each: its name, and the text with which it ended.
//     node javascript.mjs URL MODEL ai|runTools|parse      NODE_PATH names the folder of the packages
import { createRequire } from 'node:module';

const require = createRequire(import.meta.url);
const { generateText, stepCountIs, streamText, tool } = require('ai');
const { createAnthropic } = require('@ai-sdk/anthropic');
const { createOpenAI } = require('@ai-sdk/openai');
const { createOpenAICompatible } = require('@ai-sdk/openai-compatible');
const { OpenAI } = require('openai');
const { zodResponseFormat } = require('openai/helpers/zod');
const { z } = require('zod');

const [url, model] = process.argv.slice(2);
const PROMPT = 'Please [call weather {"city": "Paris"}] and [call weather {"city": "Oslo"}].';
let cities = [];
const weather = ({ city }) => {
  cities.push(city);
  return `20 degrees in ${city}`;
};
const show = (name, text) => {
  console.log(JSON.stringify({ name, text, cities }));
  cities = [];
};

async function aiSdk() {
  const options = { baseURL: `${url}/v1`, apiKey: 'none' };
  const openai = createOpenAI(options);
  const store = { providerOptions: { openai: { store: false } } };
  const models = {
    'openai.chat': { model: openai.chat(model) },
    'openai': { model: openai(model) },
    'openai without store': { model: openai(model), ...store },
    'openai-compatible': { model: createOpenAICompatible({ ...options, name: 'moeserve' })(model) },
    'anthropic': { model: createAnthropic(options)(model) },
  };
  const inputSchema = z.object({ city: z.string() });
  const tools = { weather: tool({ description: 'The weather in a city.', inputSchema, execute: weather }) };
  for (const [name, chosen] of Object.entries(models)) {
    const request = { ...chosen, tools, prompt: PROMPT, stopWhen: stepCountIs(5), maxRetries: 0 };
    show(name, (await generateText(request)).text);
    const stream = streamText({ ...request, onError: ({ error }) => { throw error; } });
    let text = '';
    for await (const piece of stream.textStream) text += piece;
    show(`${name}, streamed`, text);
  }
}

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0 });

async function runTools() {
  const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'] };
  const tools = [{ type: 'function', function: { function: weather, parse: JSON.parse, name: 'weather', parameters } }];
  const request = { model, tools, messages: [{ role: 'user', content: PROMPT }] };
  show('whole', await client.chat.completions.runTools(request).finalContent());
  show('streamed', await client.chat.completions.runTools({ ...request, stream: true }).finalContent());
}

async function parse() {
  const response_format = zodResponseFormat(z.object({ city: z.enum(['Paris', 'Oslo']) }), 'place');
  const messages = [{ role: 'user', content: 'Which city? [answer {"city": "Oslo"}]' }];
  const parsed = await client.chat.completions.parse({ model, messages, response_format, max_tokens: 100 });
  show('parse', parsed.choices[0].message.parsed.city);
}

await { ai: aiSdk, runTools, parse }[process.argv[4]]();
