// What the form says, as the body of a request.

/** Where requests of this mode go. */
export function pathOf(mode) {
  return mode === "chat" ? "v1/chat/completions" : "v1/completions";
}

/**
 * The body of a streamed request.
 *
 * @param values what `Settings.read` gives.
 * @param prompt the text, or in chat mode the messages.
 * @param numDraftTokens 0 is plain decoding; null leaves out the fields that only this server knows.
 */
export function bodyOf(values, prompt, numDraftTokens) {
  const chat = values.mode === "chat";
  const body = {
    model: values.model,
    stream: true,
    stream_options: { include_usage: true },
    temperature: values.temperature,
    top_p: values.top_p,
  };
  if (chat) {
    body.messages = prompt;
    body.max_completion_tokens = values.max_tokens;
  } else {
    body.prompt = prompt;
    body.max_tokens = values.max_tokens;
  }
  if (values.seed !== null) body.seed = values.seed;
  if (values.stop.length) body.stop = values.stop;
  for (const name of ["presence_penalty", "frequency_penalty"]) {
    if (values[name] !== 0) body[name] = values[name];
  }
  if (values.logprobs) Object.assign(body, chat ? { logprobs: true, top_logprobs: 3 } : { logprobs: 3 });
  if (numDraftTokens !== null) Object.assign(body, extensions(values, numDraftTokens));
  return body;
}

function extensions(values, numDraftTokens) {
  const fields = {
    return_speculation: true,
    speculative: { num_speculative_tokens: numDraftTokens },
  };
  if (values.top_k) fields.top_k = values.top_k;
  if (values.min_p) fields.min_p = values.min_p;
  if (values.min_tokens) fields.min_tokens = values.min_tokens;
  if (values.repetition_penalty !== 1) fields.repetition_penalty = values.repetition_penalty;
  if (values.ignore_eos) fields.ignore_eos = true;
  return fields;
}
