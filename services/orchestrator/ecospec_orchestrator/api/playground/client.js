// The server as this page uses it: readiness, version, and one streamed answer.

const READY_SECONDS = 15; // the server gives its own trial 10

/** The server answered, and refused. */
export class RefusedError extends Error {
  constructor(status, message, param) {
    super(message);
    Object.assign(this, { status, param });
  }
}

/** The server did not answer, or fell silent in the middle. */
export class LostError extends Error {}

async function ask(path, options = {}) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (options.signal?.aborted && options.signal.reason?.name !== "TimeoutError") throw error;
    throw new LostError("The server does not answer.");
  }
}

async function refusal(response) {
  const body = await response.json().catch(() => null);
  return new RefusedError(response.status, body?.error?.message ?? `The server answered ${response.status}.`, body?.error?.param);
}

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

/** "ok", or a sentence that says why not. Throws LostError. */
export async function readiness() {
  const response = await ask("/ready", { signal: AbortSignal.timeout(1000 * READY_SECONDS), cache: "no-store" });
  return response.ok ? "ok" : (await refusal(response)).message;
}

/** Whether it is still there, without generating anything. Throws LostError. */
export async function alive() {
  const response = await ask("/health", { signal: AbortSignal.timeout(1000 * READY_SECONDS), cache: "no-store" });
  return response.ok;
}

/** What runs there. Throws RefusedError and LostError. */
export async function version(key) {
  const response = await ask("/version", { headers: headers(key), cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  return response.json();
}

/** The chunks of one answer. Throws RefusedError, LostError, and what aborts the signal. */
export async function* answer(path, body, key, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!response.ok) throw await refusal(response);
  for await (const data of events(response.body, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new RefusedError(500, chunk.error.message, chunk.error.param);
    yield chunk;
  }
  throw new LostError("The server was lost in the middle of the answer.");
}

async function* events(stream, signal) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) if (block.startsWith("data: ")) yield block.slice(6);
    }
  } catch (error) {
    if (signal.aborted) throw error;
    throw new LostError("The server was lost in the middle of the answer.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
