// A picture's parameters as a command line that makes the same picture again.

import * as key from "./key.js";
import * as lists from "./lists.js";

// The key itself stays out of the clipboard and the shell's history.
export const KEY_HEADER = '-H "authorization: Bearer $SD_TF_TOKEN"';

const DECODE = [
  "import base64, json, sys",
  "answer = json.load(sys.stdin)",
  '"images" in answer or sys.exit(answer["error"])',
  '[open("sd_tf-%d.png" % i["seed"], "wb").write(base64.b64decode(i["png"]))' +
    ' for i in answer["images"]]',
].join("; ");

// Puts files into a request; its arguments are the rest of it, then name, file, name, file …
const ENCODE = [
  "import base64, json, sys",
  "body = json.loads(sys.argv[1])",
  "read = lambda path: base64.b64encode(open(path, 'rb').read()).decode()",
  "files = {}",
  "[files.setdefault(name, []).append(read(path))" +
    " for name, path in zip(sys.argv[2::2], sys.argv[3::2])]",
  "parts = lambda name: name.split('-')", // a list's name has a place behind it
  "put = lambda into, place, all: into.__setitem__(place, all if len(all) > 1 else all[0])",
  "[put(body[parts(name)[0]], int(parts(name)[1]) - 1, all) if '-' in name" +
    " else put(body, name, all) for name, all in files.items()]",
  "print(json.dumps(body))",
].join("; ");

// Returns the command line; `files` are the names of the pictures that were sent, by field. Of a list
// they have every field, since the list has a place for it.
export function curl({ files = {}, ...parameters }) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null);
  const all = { ...Object.fromEntries(given), ...lists.empty(Object.keys(files)) };
  const body = quoted(JSON.stringify(all));
  const address = new URL("generate", document.baseURI).href;
  const of = ([name, paths]) => [paths].flat().flatMap((path) => [name, path]);
  const sent = Object.entries(files).flatMap(of).map(quoted);
  const send = [
    `curl -sS ${quoted(address)}`,
    "  -H 'content-type: application/json'",
    ...(key.isKnown() ? [`  ${KEY_HEADER}`] : []),
    `  --data-binary ${sent.length > 0 ? "@-" : body}`,
    `  | python3 -c ${quoted(DECODE)}`,
  ];
  if (sent.length === 0) return send.join(" \\\n");
  return [`python3 -c ${quoted(ENCODE)}`, `  ${body} ${sent.join(" ")}`, `  | ${send[0]}`]
    .concat(send.slice(1))
    .join(" \\\n");
}

// A POSIX shell keeps every character between single quotes, except the single quote itself.
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;
