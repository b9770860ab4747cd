// What the library shows to others; everything else in it is hidden.
#pragma once

#define OCTAVO_EXPORT extern "C" __attribute__((visibility("default")))
