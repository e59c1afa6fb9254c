// The session's pictures in IndexedDB, so that a reload keeps them. A session is a tab: what other
// tabs left behind goes after a day. If the browser refuses storage, none are kept.

const DATABASE = "sd_tf";
const PICTURES = "pictures";
const MOST_PICTURES = 200;
const MOST_BYTES = 64 * 2 ** 20;
const DAY = 24 * 60 * 60 * 1000;
const SESSION_KEY = `sd_tf ${location.pathname} session`;

const session = ownSession();
const opened = open();

function ownSession() {
  const fresh = `${Date.now()}-${Math.random()}`;
  try {
    const known = sessionStorage.getItem(SESSION_KEY) ?? fresh;
    sessionStorage.setItem(SESSION_KEY, known);
    return known;
  } catch {
    return fresh;
  }
}

function open() {
  return new Promise((resolve, reject) => {
    const request = indexedDB.open(DATABASE, 2);
    request.onupgradeneeded = () => {
      // Records of version 1 have no words, so they are dropped.
      if (request.result.objectStoreNames.contains(PICTURES)) {
        request.result.deleteObjectStore(PICTURES);
      }
      request.result.createObjectStore(PICTURES, { keyPath: "id", autoIncrement: true });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  }).catch(() => null);
}

// Returns this session's stored pictures, oldest first: {id, png: Blob, parameters, words}.
export async function load() {
  const all = (await transact("readonly", (store) => store.getAll())) ?? [];
  const forgotten = all.filter((r) => r.session !== session && r.time < Date.now() - DAY);
  await remove(forgotten.map((record) => record.id));
  return all.filter((record) => record.session === session);
}

// Stores a picture; returns its id, or null if it could not be stored.
export async function add({ png, parameters, words }) {
  const record = { session, time: Date.now(), png, parameters, words };
  const id =
    (await transact("readwrite", (store) => store.add(record))) ??
    ((await makeRoom()) ? await transact("readwrite", (store) => store.add(record)) : null);
  await trim();
  return id;
}

export async function remove(ids) {
  if (ids.length > 0) await transact("readwrite", (store) => ids.forEach((id) => store.delete(id)));
}

async function makeRoom() {
  const all = (await transact("readonly", (store) => store.getAll())) ?? [];
  const oldest = all.slice(0, Math.ceil(all.length / 4));
  await remove(oldest.map((record) => record.id));
  return oldest.length > 0;
}

async function trim() {
  const all = (await transact("readonly", (store) => store.getAll())) ?? [];
  let [count, bytes] = [0, 0];
  const beyond = all.toReversed().filter((record) => {
    bytes += record.png.size;
    count += 1;
    return count > MOST_PICTURES || bytes > MOST_BYTES;
  });
  await remove(beyond.map((record) => record.id));
}

// Returns the result of `work`'s request, or null if the browser refuses (no storage, quota).
async function transact(mode, work) {
  const database = await opened;
  if (database === null) return null;
  return new Promise((resolve, reject) => {
    const transaction = database.transaction(PICTURES, mode);
    const request = work(transaction.objectStore(PICTURES));
    transaction.oncomplete = () => resolve(request?.result ?? null);
    transaction.onabort = () => reject(transaction.error);
  }).catch(() => null);
}
