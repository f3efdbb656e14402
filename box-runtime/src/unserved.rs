//! The rest of the contract: known, and not served yet.

use box_protocol::BoxError;
use box_protocol::actions::{
    CatalogDelete, CatalogGet, CatalogList, CatalogPut, PortShare, SystemProbe, SystemStorage,
    TenantGrant, TenantRevoke,
};
use box_rpc::{Action, Call, Handle, RouterBuilder, contract};

use crate::runtime::BoxRuntime;

macro_rules! unserved {
    ($($action:ident),* $(,)?) => {
        contract! {
            /// The actions of the contract that answer `unsupported`.
            pub Unserved: $($action),*
        }

        $(impl Handle<$action> for BoxRuntime {
            async fn handle(
                &self,
                _: <$action as Action>::Params,
                _: Call<$action>,
            ) -> Result<<$action as Action>::Result, BoxError> {
                Err(BoxError::unsupported(not_served_yet::<$action>()))
            }
        })*

        /// Adds them to a router.
        pub(crate) fn unserved(router: RouterBuilder<BoxRuntime>) -> RouterBuilder<BoxRuntime> {
            router$(.on::<$action>())*
        }
    };
}

fn not_served_yet<A: Action>() -> String {
    format!("{} is not served yet", A::NAME)
}

unserved![
    SystemStorage,
    SystemProbe,
    TenantGrant,
    TenantRevoke,
    PortShare,
    CatalogPut,
    CatalogGet,
    CatalogList,
    CatalogDelete,
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use box_protocol::actions::ALL_ACTIONS;

    use super::*;
    use crate::handlers::Served;

    #[test]
    fn every_action_of_the_contract_is_answered_once() {
        let answered: Vec<_> = Served::NAMES.iter().chain(Unserved::NAMES).collect();
        assert_eq!(answered.len(), ALL_ACTIONS.len());
        assert_eq!(
            answered.into_iter().collect::<BTreeSet<_>>(),
            ALL_ACTIONS.iter().collect()
        );
    }
}
