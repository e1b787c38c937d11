// Activation functions, element by element.
#pragma once
#include "vec.h"

struct Silu {
    METHOD static vf of(vf x) { return silu(x); }
};
struct Sigmoid {
    METHOD static vf of(vf x) { return sigmoid(x); }
};
struct GeluTanh {
    // x / 2 * (1 + tanh(u)) is x / (1 + exp(-2u))
    METHOD static vf of(vf x) {
        return quotient(x, 1.0f + exp(-1.5957691216057308f * (x + 0.044715f * x * x * x)));
    }
};
