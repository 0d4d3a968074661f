/* The radix tree's node and the search among a node's children. Records only, no policy.
 *
 * In C for two reasons. A node is 136 bytes in place of 350; and the cyclic collector, which would
 * stop the thread to walk all nodes, does not see it. The tree breaks the cycle of parent and
 * children itself when it takes a node out.
 *
 *     node   tokens, parent, children, account     owned references
 *            pages[tier], as device, host, disk    owned references: page ids, packed
 *            prev[tier], next[tier]                not owned: a node that dies unlinks itself
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>

#include "tree_node.h"

#define NUM_TIERS 3
#define NUM_OBJECTS 7
#define TOKEN 4   /* bytes */
#define BLOCK 256 /* bytes compared at once */

struct node {
    PyObject_HEAD
    union {
        struct {
            PyObject *tokens, *account, *parent, *children, *pages[NUM_TIERS];
        };
        PyObject *objects[NUM_OBJECTS];
    };
    struct node *prev[NUM_TIERS], *next[NUM_TIERS];
    long long last_use;
    int refs, pins, uses, priority;
};

/* The level itself, -1 on error. */
static int checked(Py_ssize_t level) {
    if (level >= 0 && level < NUM_TIERS) return (int)level;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "no such tier");
    return -1;
}

static void unlink_from(struct node *self, int level) {
    if (!self->next[level]) return;
    self->prev[level]->next[level] = self->next[level];
    self->next[level]->prev[level] = self->prev[level];
    self->prev[level] = self->next[level] = NULL;
}

static PyObject *node_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *tokens, *account;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "SO:Node", &tokens, &account)) return NULL;
    struct node *self = PyObject_New(struct node, type);
    if (!self) return NULL;
    memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
    PyObject *const empty = PyBytes_FromStringAndSize("", 0);
    PyObject *const initial[NUM_OBJECTS] = {tokens,  account, Py_None, Py_None,
                                            empty, empty, empty};
    for (int i = 0; i < NUM_OBJECTS; i++) {
        Py_INCREF(initial[i]);
        self->objects[i] = initial[i];
    }
    Py_DECREF(empty);
    self->priority = 1;
    return (PyObject *)self;
}

static void node_dealloc(PyObject *object) {
    struct node *self = (struct node *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (int level = 0; level < NUM_TIERS; level++) unlink_from(self, level);
    for (int i = 0; i < NUM_OBJECTS; i++) Py_XDECREF(self->objects[i]);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Put a node before another on its list of a tier, wherever it stood on one. */
static PyObject *link_before(PyObject *object, PyObject *const *args, Py_ssize_t nargs) {
    struct node *self = (struct node *)object;
    if (nargs != 2 || Py_TYPE(args[0]) != Py_TYPE(object)) {
        PyErr_SetString(PyExc_TypeError, "link_before takes a node and a tier");
        return NULL;
    }
    struct node *anchor = (struct node *)args[0];
    const int level = checked(PyLong_AsSsize_t(args[1]));
    if (level < 0) return NULL;
    unlink_from(self, level);
    if (!anchor->next[level]) anchor->prev[level] = anchor->next[level] = anchor;
    self->prev[level] = anchor->prev[level];
    self->next[level] = anchor;
    self->prev[level]->next[level] = self;
    anchor->prev[level] = self;
    Py_RETURN_NONE;
}

static PyObject *node_unlink(PyObject *object, PyObject *argument) {
    const int level = checked(PyLong_AsSsize_t(argument));
    if (level < 0) return NULL;
    unlink_from((struct node *)object, level);
    Py_RETURN_NONE;
}

static PyObject *after(PyObject *object, PyObject *argument) {
    const int level = checked(PyLong_AsSsize_t(argument));
    if (level < 0) return NULL;
    PyObject *next = (PyObject *)((struct node *)object)->next[level];
    if (!next) next = Py_None;
    Py_INCREF(next);
    return next;
}

/* node[level]: the packed page ids of that tier. */
static PyObject *get_pages(PyObject *object, Py_ssize_t level) {
    if (checked(level) < 0) return NULL;
    PyObject *pages = ((struct node *)object)->pages[level];
    Py_INCREF(pages);
    return pages;
}

static int set_pages(PyObject *object, Py_ssize_t level, PyObject *pages) {
    if (checked(level) < 0) return -1;
    if (!pages || !PyBytes_Check(pages)) {
        PyErr_SetString(PyExc_TypeError, "a tier's pages are bytes");
        return -1;
    }
    struct node *self = (struct node *)object;
    PyObject *before = self->pages[level];
    Py_INCREF(pages);
    self->pages[level] = pages;
    Py_DECREF(before);
    return 0;
}

static PyMethodDef node_methods[] = {
    {"link_before", (PyCFunction)(void (*)(void))link_before, METH_FASTCALL, NULL},
    {"unlink", node_unlink, METH_O, NULL},
    {"after", after, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

#define OBJECT(name) {#name, T_OBJECT_EX, offsetof(struct node, name), 0, NULL}
#define PAGES(name, tier) {name, T_OBJECT_EX, offsetof(struct node, pages[tier]), 0, NULL}
#define INTEGER(name) {#name, T_INT, offsetof(struct node, name), 0, NULL}
static PyMemberDef node_members[] = {
    OBJECT(tokens), OBJECT(account), OBJECT(parent), OBJECT(children),
    PAGES("device", 0), PAGES("host", 1), PAGES("disk", 2),
    INTEGER(refs), INTEGER(pins), INTEGER(uses), INTEGER(priority),
    {"last_use", T_LONGLONG, offsetof(struct node, last_use), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot node_slots[] = {
    {Py_tp_new, node_new},         {Py_tp_dealloc, node_dealloc}, {Py_tp_methods, node_methods},
    {Py_tp_members, node_members}, {Py_sq_item, get_pages},       {Py_sq_ass_item, set_pages},
    {0, NULL},
};

static PyType_Spec node_spec = {"tiers._kernels.Node", sizeof(struct node), 0, Py_TPFLAGS_DEFAULT,
                                node_slots};

/* The run of item i: a node of `list`, or the last node of a chunk. NULL where it is neither. */
static PyObject *run_of(PyObject *list, Py_ssize_t i) {
    PyObject *item = PyList_GetItem(list, i);
    if (item && PyList_Check(item)) item = PyList_GetItem(item, PyList_Size(item) - 1);
    PyObject *run = item ? ((struct node *)item)->tokens : NULL;
    if (run && !PyBytes_Check(run)) PyErr_SetString(PyExc_TypeError, "a run is bytes");
    return run && PyBytes_Check(run) ? run : NULL;
}

/* How many items of `list` sort before `key`, -1 on error. */
static Py_ssize_t bisect(PyObject *list, const char *key, Py_ssize_t size) {
    Py_ssize_t low = 0, high = PyList_Size(list);
    while (low < high) {
        const Py_ssize_t middle = (low + high) / 2;
        PyObject *run = run_of(list, middle);
        if (!run) return -1;
        const Py_ssize_t run_size = PyBytes_Size(run);
        const int order = memcmp(PyBytes_AsString(run), key, run_size < size ? run_size : size);
        if (order < 0 || (order == 0 && run_size < size)) low = middle + 1;
        else high = middle;
    }
    return low;
}

PyObject *rx_locate(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    char *key;
    Py_ssize_t size;
    (void)self;
    if (nargs != 2 || !PyList_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "locate takes a list of chunks and a key");
        return NULL;
    }
    if (PyBytes_AsStringAndSize(args[1], &key, &size) < 0) return NULL;
    const Py_ssize_t num_chunks = PyList_Size(args[0]);
    Py_ssize_t chunk = num_chunks > 1 ? bisect(args[0], key, size) : 0;
    if (chunk == num_chunks) chunk--;
    PyObject *nodes = chunk < 0 ? NULL : PyList_GetItem(args[0], chunk);
    const Py_ssize_t place = nodes ? bisect(nodes, key, size) : -1;
    return place < 0 ? NULL : Py_BuildValue("(nn)", chunk, place);
}

PyObject *rx_common_prefix(PyObject *self, PyObject *const *args, Py_ssize_t nargs) {
    char *a, *b;
    Py_ssize_t n, rest;
    (void)self;
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "common_prefix takes two runs and an offset");
        return NULL;
    }
    const Py_ssize_t offset = PyLong_AsSsize_t(args[2]);
    if (offset == -1 && PyErr_Occurred()) return NULL;
    if (PyBytes_AsStringAndSize(args[0], &a, &n) < 0) return NULL;
    if (PyBytes_AsStringAndSize(args[1], &b, &rest) < 0) return NULL;
    if (offset < 0 || offset > rest) rest = 0;
    else b += offset, rest -= offset;
    if (rest < n) n = rest;
    Py_ssize_t same = 0;
    while (same + BLOCK <= n && memcmp(a + same, b + same, BLOCK) == 0) same += BLOCK;
    while (same + TOKEN <= n && memcmp(a + same, b + same, TOKEN) == 0) same += TOKEN;
    return PyLong_FromSsize_t(same);
}

PyObject *rx_untrack(PyObject *self, PyObject *object) {
    (void)self;
    if (PyObject_GC_IsTracked(object)) PyObject_GC_UnTrack(object);
    Py_INCREF(object);
    return object;
}

int rx_add_node_type(PyObject *module) {
    PyObject *type = PyType_FromSpec(&node_spec);
    const int failed = !type || PyModule_AddObjectRef(module, "Node", type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}
