/**
 * How a table is drawn, from what the server says of it: what it is declared to be, its key, and the types of its columns.
 *
 * @typedef {Object} Shape
 * @property {("ranked"|"stacked"|"lines"|"estimate"|"groups"|"figures"|"grid")[]} ways to draw it, the best first
 * @property {string} [time] the key's column that places rows in time
 * @property {string[]} groups the key's columns that are no times
 * @property {string[]} measures numbers that are not in the key
 * @property {string[]} key
 * @property {string[]} columns
 * @property {Object<string, string>} types by column
 */

const NUMBERS = ["integer", "float", "decimal"];
const TIMES = ["timestamp", "date"];
/** Kinds of products whose numbers can be drawn; the rows of the others are things, such as sessions and joined pairs. */
const DRAWN = ["aggregate", "view", "select", "quantiles", "skew", "frequency", "membership"];
const TIME_TEXT = /^\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\d(\.\d+)?Z)?$/;

/**
 * @param {{table: string, key: string[], columns: string[], types: Object<string, string>, declared?: {kind: string}}} table
 *   an entry of `GET /v1/tables`, or a SELECT described by {@link typesOf}
 * @returns {Shape}
 */
export function shapeOf({ table, key, columns, types, declared }) {
  const kind = declared?.kind;
  const time = key.find((column) => TIMES.includes(types[column]));
  const numbers = columns.filter((column) => !key.includes(column) && NUMBERS.includes(types[column]));
  const shape = { key, columns, types, time, groups: key.filter((column) => !TIMES.includes(types[column])), measures: numbers };
  if (kind === "top_n") {
    return { ...shape, ways: ["ranked", "grid"], groups: shape.groups.filter((column) => column !== "rank") };
  }
  if (kind === "distinct") return { ...shape, ways: ["estimate", "grid"], measures: [table] };
  if (key.length === 0) return { ...shape, ways: ["figures", "grid"] };
  if (numbers.length === 0 || !DRAWN.includes(kind)) return { ...shape, ways: ["grid"] };
  if (time !== undefined) return { ...shape, ways: shape.groups.length ? ["stacked", "lines", "grid"] : ["lines", "grid"] };
  return { ...shape, ways: ["groups", "grid"] };
}

/** The types of columns as rows show them; the server tells those of tables, not those of a SELECT's result. */
export function typesOf(columns, rows) {
  const found = {};
  for (const column of columns) {
    const value = rows.find((row) => row[column] !== null)?.[column];
    if (typeof value === "number") found[column] = "float";
    else if (typeof value === "boolean") found[column] = "boolean";
    else found[column] = TIME_TEXT.test(value) ? "timestamp" : "text";
  }
  return found;
}
