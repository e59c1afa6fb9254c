// A picture's parameters as a command line that makes the same picture again.

const DECODE = [
  "import base64, json, sys",
  "answer = json.load(sys.stdin)",
  '"images" in answer or sys.exit(answer["error"])',
  '[open("sd_tf-%d.png" % i["seed"], "wb").write(base64.b64decode(i["png"]))' +
    ' for i in answer["images"]]',
].join("; ");

export function curl(parameters) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null);
  const address = new URL("generate", document.baseURI).href;
  return [
    `curl -sS ${quoted(address)}`,
    "  -H 'content-type: application/json'",
    `  --data-binary ${quoted(JSON.stringify(Object.fromEntries(given)))}`,
    `  | python3 -c ${quoted(DECODE)}`,
  ].join(" \\\n");
}

// Between single quotes a POSIX shell reads everything as it stands, but the single quote.
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
