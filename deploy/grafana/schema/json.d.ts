/** A type as it looks in JSON: an enumeration is the union of its values. */
export type Json<T> = 0 extends 1 & T
  ? T // any
  : T extends string
    ? `${T}`
    : T extends readonly (infer U)[]
      ? Json<U>[]
      : T extends object
        ? { [K in keyof T]: Json<T[K]> }
        : T;
