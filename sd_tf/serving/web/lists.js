// Parameters with a value for each of several models: a field for each value, and one list in a request.

const MANY = /^(.+)-(\d+)$/; // the name of such a field: the list's, and the place in it

// Returns the name of the list that a field's value is put into, or the field's own.
export const listOf = (name) => MANY.exec(name)?.[1] ?? name;

// Whether a request gives a value, or one of a list's.
export const has = (request, name) =>
  Object.keys(request).some((given) => given === name || listOf(given) === name);

// Returns a request with the values of each list put together; null where a model has none.
export function gathered(request, fields) {
  const found = { ...request };
  for (const { name } of fields) {
    const [, list] = MANY.exec(name) ?? [];
    if (list === undefined) continue;
    found[list] = [...(found[list] ?? []), request[name] ?? null];
    delete found[name];
  }
  const isEmpty = (value) => Array.isArray(value) && value.every((one) => one === null);
  return Object.fromEntries(Object.entries(found).filter(([, value]) => !isEmpty(value)));
}

// Returns a picture's parameters with each value of a list under its field's name.
export function spread(parameters, fields) {
  const found = { ...parameters };
  for (const { name } of fields.filter((field) => field.per_model)) {
    const [, list, number] = MANY.exec(name) ?? [null, name, 1];
    if (Array.isArray(parameters[list])) found[name] = parameters[list][number - 1];
  }
  return found;
}

// Returns the lists that hold nothing yet, for the files of these fields.
export function empty(names) {
  const lists = {};
  for (const name of names) {
    const [, list, place] = MANY.exec(name) ?? [];
    if (list === undefined) continue;
    lists[list] = Array(Math.max(place, lists[list]?.length ?? 0)).fill(null);
  }
  return lists;
}
