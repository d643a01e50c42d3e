// The state of a room as text for the address: versioned, compressed, at most 8 kB.
export const VERSION = 1;
export const LONGEST = 8192;
const MOST_TEXT = 400000; // characters of a state that is unpacked

export class StateError extends Error {
  constructor(kind) { super(kind); this.kind = kind; }
}

async function through(bytes, stream, most) {
  const reader = new Blob([bytes]).stream().pipeThrough(stream).getReader();
  const parts = [];
  let size = 0;
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    size += value.length;
    if (size > most) { await reader.cancel(); throw new StateError("malformed"); }
    parts.push(value);
  }
  return new Uint8Array(await new Blob(parts).arrayBuffer());
}

export async function pack(state) {
  const plain = new TextEncoder().encode(JSON.stringify(state));
  const bytes = await through(plain, new CompressionStream("deflate-raw"), Infinity);
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  const safe = btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return `${VERSION}.${safe}`;
}

export async function unpack(packed) {
  const found = /^(\d{1,6})\.([A-Za-z0-9_-]+)$/.exec(packed);
  if (!found) throw new StateError("malformed");
  if (Number(found[1]) > VERSION) throw new StateError("newer");
  if (Number(found[1]) < 1 || packed.length > LONGEST) throw new StateError("malformed");
  try {
    const binary = atob(found[2].replaceAll("-", "+").replaceAll("_", "/"));
    const bytes = Uint8Array.from(binary, (c) => c.charCodeAt(0));
    const plain = await through(bytes, new DecompressionStream("deflate-raw"), MOST_TEXT);
    return JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(plain));
  } catch (error) {
    throw new StateError("malformed");
  }
}
