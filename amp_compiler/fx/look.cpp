// Whether Python objects stand, and tensors lie in memory, where they did: one walk without making a single object.
// It is called with the interpreter's lock held. Functions of Python and torch come as pointers, so that it is built
// without their headers.
#include <cstdint>

namespace {

using Object = void*;

struct Functions {
  Object (*dict_of)(Object, void*);                        // PyObject_GenericGetDict
  Object (*find)(Object, Object);                          // PyDict_GetItem
  int (*next)(Object, intptr_t*, Object*, Object*);        // PyDict_Next
  intptr_t (*size)(Object);                                // PyList_Size
  Object (*item)(Object, intptr_t);                        // PyList_GetItem
  void (*release)(Object);                                 // Py_DecRef
  void* (*address)(Object);                                // of a tensor's first element
};

// What stands in the i-th owner are the keys and values from ends[i - 1] to ends[i].
struct Section {
  int64_t count;
  const Object* owners;
  const int64_t* ends;
  const Object* keys;
  const Object* values;
};

struct Looks {
  Section attributes, tables, lists, tensors;
};

bool same_attributes(const Functions& python, const Section& all) {
  for (int64_t i = 0, at = 0; i < all.count; ++i) {
    const Object table = python.dict_of(all.owners[i], nullptr);
    if (table == nullptr) return false;
    bool same = true;
    for (; same && at < all.ends[i]; ++at) same = python.find(table, all.keys[at]) == all.values[at];
    python.release(table);
    if (!same) return false;
  }
  return true;
}

bool same_tables(const Functions& python, const Section& all) {
  for (int64_t i = 0, at = 0; i < all.count; ++i) {
    intptr_t place = 0;
    Object key = nullptr, value = nullptr;
    for (; python.next(all.owners[i], &place, &key, &value); ++at)
      if (at == all.ends[i] || key != all.keys[at] || value != all.values[at]) return false;
    if (at != all.ends[i]) return false;
  }
  return true;
}

bool same_lists(const Functions& python, const Section& all) {
  for (int64_t i = 0, at = 0; i < all.count; ++i) {
    const int64_t first = at;
    if (python.size(all.owners[i]) != all.ends[i] - first) return false;
    for (; at < all.ends[i]; ++at)
      if (python.item(all.owners[i], at - first) != all.values[at]) return false;
  }
  return true;
}

bool same_tensors(const Functions& python, const Section& all) {
  for (int64_t i = 0; i < all.count; ++i)
    if (python.address(all.owners[i]) != all.values[i]) return false;
  return true;
}

}  // namespace

extern "C" int look(const Functions* python, const Looks* all) {
  try {
    return same_attributes(*python, all->attributes) && same_tables(*python, all->tables) &&
           same_lists(*python, all->lists) && same_tensors(*python, all->tensors);
  } catch (...) {  // a tensor that lies nowhere
    return 0;
  }
}
