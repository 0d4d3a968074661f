/* What module.c takes from tree_node.c. */
#ifndef RX_TREE_NODE_H
#define RX_TREE_NODE_H

#include <Python.h>

/* locate(chunks, key) -> (chunk, place): where `key` sorts among the runs of chunked nodes. */
PyObject *rx_locate(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

/* common_prefix(run, tokens, offset) -> bytes that `run` and tokens[offset:] share, whole tokens. */
PyObject *rx_common_prefix(PyObject *self, PyObject *const *args, Py_ssize_t nargs);

/* untrack(object) -> object, which the cyclic collector no longer sees. */
PyObject *rx_untrack(PyObject *self, PyObject *object);

/* Adds the type `Node` to the module; -1 with an exception set on failure. */
int rx_add_node_type(PyObject *module);

#endif
