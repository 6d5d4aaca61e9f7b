//! Keys and values of the positions that a model has seen, so that sampling computes each position once.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use phalanx_tensor::{Category, DType, Device, Heads, Tensor, View, ViewMut};

/// The keys and values of one sequence, for each attention layer that has run.
pub struct KeyValueCache {
    device: Device,
    capacity: usize,
    /// By the layer's name: `[1, capacity, cache_width]`, of [`Heads`].
    layers: Mutex<HashMap<String, Tensor>>,
}

impl KeyValueCache {
    /// An empty cache with room for `capacity` positions, in the memory of `device`.
    pub fn new(device: &Device, capacity: usize) -> KeyValueCache {
        KeyValueCache { device: device.clone(), capacity, layers: Mutex::default() }
    }

    /// Attention of the positions `past ..` over all positions so far; stores their keys and values.
    /// qkv: `[1, new, qkv_width]`, out: `[1, new, out_width]`, or `[1, 1, out_width]` for the last position only
    pub(crate) fn attend(&self, layer: &str, heads: Heads, past: usize, qkv: View, out: ViewMut) {
        let mut layers = self.layers.lock().unwrap_or_else(PoisonError::into_inner);
        if !layers.contains_key(layer) {
            let empty = self.allocate(qkv.dtype(), heads.cache_width());
            layers.insert(layer.to_string(), empty);
        }
        let cache = layers.get_mut(layer).expect("inserted above");
        self.device.attention_cached(qkv, heads, past, cache.view_mut(), out);
    }

    fn allocate(&self, dtype: DType, columns: usize) -> Tensor {
        self.device.alloc(dtype, [1, self.capacity, columns], Category::Activations, "attention.cache")
    }
}
